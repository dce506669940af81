"""What attention and training steps on several GPUs cost: models, and rates, measured."""

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
from .step import DENSE as DENSE
from .step import Model as Model
from .step import Step as Step
from .step import data_ranks as data_ranks
from .step import step as step
from .step import step_messages as step_messages
