"""Other libraries' interfaces to attention, served by this one: one file for each."""
