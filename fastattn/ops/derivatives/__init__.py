"""Attention under torch.func and forward mode, and its second derivatives."""
