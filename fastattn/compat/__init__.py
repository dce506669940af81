"""Other libraries' attention interfaces, served by fastattn: a file or folder each."""
