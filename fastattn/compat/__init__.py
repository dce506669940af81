"""Integrations: other libraries' attention interfaces, a file or folder each."""
