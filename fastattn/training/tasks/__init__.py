"""What a run learns: batches, losses and figures of each task."""

from .task import Batch as Batch
from .task import LanguageTask as LanguageTask
from .task import Task as Task
