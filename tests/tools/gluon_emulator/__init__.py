"""A CPU emulator of the part of Gluon that Hopper kernels use: Gluon has no interpreter.

    launch(kernel, grid, *arguments, **constexprs)

runs the Python source of a @gluon.jit kernel, each partition of a warp-specialised program as a
thread, with mbarriers, TMA transfers and warpgroup products that are asynchronous as on the GPU.
Beside the numbers it checks the protocol: races, deadlocks, missing fences and the other faults in
`errors` raise, each under its own name. Races are found from the order that barriers impose, not
from the order in which this run happened to do things.

Not modelled: layouts (but for operands of products), bank conflicts, clusters, approximate exp2,
sums in fewer bits than fp32, as tensor cores have them of products in 8 bits.
Compiling the same kernel for sm_90 (`fastattn.testing.compiling`) sees to the layouts.
"""

from .errors import BarrierError as BarrierError
from .errors import DeadlockError as DeadlockError
from .errors import EmulationError as EmulationError
from .errors import IllegalError as IllegalError
from .errors import InFlightError as InFlightError
from .errors import MissingFenceError as MissingFenceError
from .errors import OutOfBoundsError as OutOfBoundsError
from .errors import RaceError as RaceError
from .errors import ResourceError as ResourceError
from .errors import UnfinishedError as UnfinishedError
from .errors import UninitializedError as UninitializedError
from .language import assembly as assembly
from .launch import Emulated as Emulated
from .launch import launch as launch

__all__ = [
    "BarrierError",
    "DeadlockError",
    "Emulated",
    "EmulationError",
    "IllegalError",
    "InFlightError",
    "MissingFenceError",
    "OutOfBoundsError",
    "RaceError",
    "ResourceError",
    "UnfinishedError",
    "UninitializedError",
    "assembly",
    "launch",
]
