"""The run's settings: schema, loading, checking, writing. Use `load_config` to load them."""

# ruff: noqa: F401 - imported from here

from utils.config.data import DataConfig
from utils.config.load import Loaded, config_hash, config_of_run, differences, format_config, load_config, to_yaml
from utils.config.model import ModelConfig
from utils.config.schema import AmpConfig, Config
from utils.config.train import MuonConfig, OptimizerConfig, SchedulerConfig, TrainConfig
