"""Training tasks: batches, losses and scores of each."""

from .task import Batch as Batch
from .task import LanguageTask as LanguageTask
from .task import Task as Task
