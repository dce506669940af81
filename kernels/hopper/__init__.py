"""Warp-specialised attention for Hopper (sm_90) in Gluon; README.md explains the pipeline."""
