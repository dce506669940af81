"""Interfaces of other libraries to attention, served by this one: a file or folder each."""
