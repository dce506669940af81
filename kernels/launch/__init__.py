"""What launchers share: tiles, arguments, tables, launches that are cached."""
