"""Expert-parallel dispatch and combine over symmetric memory.

>>> import ep
>>> with ep.World.connect() as world:
...     config = ep.EpConfig.load("kimi_k3", ranks=world.size, max_tokens=8)
...     with ep.Exchange(world, config) as exchange:
...         received = exchange.dispatch(x, ids, weights)
...         y = exchange.combine(experts(received), ids)
"""

from ep.bootstrap import World
from ep.buffers import EpBuffers
from ep.config import DispatchFormat, EpConfig, Protocol
from ep.errors import (
    ArgumentError,
    BootstrapError,
    CollectiveError,
    ConfigError,
    DeviceError,
    EpError,
    EpTimeout,
    HeapError,
    StateError,
)
from ep.exchange import Exchange, Received
from ep.layout import EpLayout
from ep.memory.cuda import DeviceArray
from ep.version import __version__

__all__ = [
    "ArgumentError",
    "BootstrapError",
    "CollectiveError",
    "ConfigError",
    "DeviceArray",
    "DeviceError",
    "DispatchFormat",
    "EpBuffers",
    "EpConfig",
    "EpError",
    "EpLayout",
    "EpTimeout",
    "Exchange",
    "HeapError",
    "Protocol",
    "Received",
    "StateError",
    "World",
    "__version__",
]
