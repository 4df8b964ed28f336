"""The run's settings: schema, loading, checking, writing. Use `load_config` to load them."""

from utils.config.data import DataConfig
from utils.config.load import Loaded, config_hash, config_of_run, differences, format_config, load_config, to_yaml
from utils.config.model import ModelConfig
from utils.config.schema import AmpConfig, Config, DistConfig
from utils.config.train import MuonConfig, OptimizerConfig, SchedulerConfig, TrainConfig

__all__ = [
    "AmpConfig",
    "Config",
    "DataConfig",
    "DistConfig",
    "Loaded",
    "ModelConfig",
    "MuonConfig",
    "OptimizerConfig",
    "SchedulerConfig",
    "TrainConfig",
    "config_hash",
    "config_of_run",
    "differences",
    "format_config",
    "load_config",
    "to_yaml",
]
