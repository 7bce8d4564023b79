"""`fissile bench`: measures a running router (`serve`), or a checkpoint in this process (`offline`)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import math
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click
import grpc
import uvloop
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from common.bench import report
from common.bench.dataset import DatasetError, read_dataset
from common.bench.figures import OBJECTIVES, Figures, Setting, figures_of
from common.bench.load import ClosedLoop, Extent, Load, OpenLoop, gaps
from common.bench.machine import CpuMeter, cpu_model, meter_for
from common.bench.offline import OfflineRun
from common.bench.records import Record
from common.bench.service import RouterClient, Run, Terms
from common.bench.workload import GivenWorkload, Lengths, RandomWorkload, Work
from common.cli.client import Credentials, call_failed, open_channel
from common.cli.console import Console
from common.cli.failure import CommandError
from common.cli.generate import given
from common.cli.group import OFFLINE, find_entry_points
from common.cli.options import Duration, address_option, option, seconds
from common.cli.security import apply, with_credentials
from common.cli.version import versions
from common.config import SCHEDULING_POLICIES, Config
from common.errors import ApiError
from common.limits import CPU_MAX_NUM_BATCHED_TOKENS
from common.telemetry.logs import LEVEL_VARIABLE, setup_logging
