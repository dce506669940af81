"""Training tasks: batches, losses and scores."""

from .task import Batch as Batch
from .task import LanguageTask as LanguageTask
from .task import Task as Task
