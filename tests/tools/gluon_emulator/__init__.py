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

from .errors import EmulationError as EmulationError
from .errors import RaceError as RaceError
from .language import assembly as assembly
from .launch import Emulated as Emulated
from .launch import launch as launch
