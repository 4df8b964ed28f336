"""The run's settings: schema, loading, checking, writing. `load_config` is the door."""

from .amp import AmpConfig
from .data import DataConfig
from .load import Loaded, load_config
from .model import ModelConfig
from .schema import Config, DistConfig
from .train import OptimizerConfig, SchedulerConfig, TrainConfig
from .write import config_hash, differences, format_config, to_yaml

__all__ = [
    "AmpConfig",
    "Config",
    "DataConfig",
    "DistConfig",
    "Loaded",
    "ModelConfig",
    "OptimizerConfig",
    "SchedulerConfig",
    "TrainConfig",
    "config_hash",
    "differences",
    "format_config",
    "load_config",
    "to_yaml",
]
