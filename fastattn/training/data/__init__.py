"""Training data: files, split and made into batches."""

from .text import DataError as DataError
from .text import TextDataset as TextDataset
from .text import read_text_files as read_text_files
from .text import split_text as split_text
from .text import standard_library_text as standard_library_text
