"""Cost model of context parallelism, and measured rates for it."""

from .model import METHODS as METHODS
from .model import MODELS as MODELS
from .model import Cost as Cost
from .model import Messages as Messages
from .model import Rates as Rates
from .model import Shape as Shape
from .model import choice as choice
from .model import cost as cost
from .model import heads_at_once as heads_at_once
from .model import ideal_seconds as ideal_seconds
from .model import messages as messages
from .model import serves as serves
