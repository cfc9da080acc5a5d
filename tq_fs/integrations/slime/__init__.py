"""slime (github.com/THUDM/slime) without a Proxy of ours: a converter, and a training actor.

The RolloutManager's conversion puts a rollout's large fields into a store and leaves references in
the train data; the actor turns them back into tensors. See docs/integrations/slime.md.
"""

from tq_fs.integrations.slime._actor import HydratingActorMixin, SlicingActorMixin
from tq_fs.integrations.slime._convert import convert_samples_to_train_data
from tq_fs.integrations.slime._pinned import pinned_empty
from tq_fs.integrations.slime._settings import COLUMN, CONSUMER, Settings
from tq_fs.integrations.slime._store import close_stores

__all__ = [
    "COLUMN",
    "CONSUMER",
    "HydratingActorMixin",
    "Settings",
    "SlicingActorMixin",
    "close_stores",
    "convert_samples_to_train_data",
    "pinned_empty",
]
