"""What attention over several GPUs costs: a model of it, and the rates that it needs, measured."""

from .model import METHODS as METHODS
from .model import MODELS as MODELS
from .model import Messages as Messages
from .model import Rates as Rates
from .model import Shape as Shape
from .model import choice as choice
from .model import cost as cost
from .model import ideal_seconds as ideal_seconds
from .model import messages as messages
from .model import serves as serves
