"""A parameter-server key-value store with pluggable gradient compression.

    import kvstore
    kv = kvstore.create('dist_sync')
    kv.set_gradient_compression({'type': '2bit', 'threshold': '0.5'})
    kv.init('w', w)
    kv.pushpull('w', grad, out=grad)

`create` makes a store, `KVStore` says what it offers, `kvstore.errors` what can go wrong. A whole job on this machine:
`kvstore-server launch -n WORKERS -s SERVERS -- python train.py`.
"""

from typing import TYPE_CHECKING, Any

from kvstore.config import Config
from kvstore.create import STORES, create
from kvstore.errors import KVStoreError
from kvstore.handle import Handle
from kvstore.store import KVStore

__version__ = "0.1.0"
__all__ = ["QSVRG", "STORES", "Config", "Handle", "KVStore", "KVStoreError", "__version__", "create"]

if TYPE_CHECKING:
    from kvstore.qsvrg import QSVRG


def __getattr__(name: str) -> Any:
    """`QSVRG`, imported on first use: few need what it imports."""
    if name == "QSVRG":
        from kvstore.qsvrg import QSVRG

        return QSVRG
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
