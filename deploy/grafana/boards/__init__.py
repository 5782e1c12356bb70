"""The dashboards: what each shows. `build.py` makes Grafana's JSON of it; a test holds every name to live services."""

from __future__ import annotations

from boards.exchange import EXCHANGE
from boards.hosts import HOSTS
from boards.overview import OVERVIEW
from boards.proxy import PROXY
from boards.queue import QUEUE
from boards.training import TRAINING

BOARDS = (OVERVIEW, QUEUE, PROXY, TRAINING, EXCHANGE, HOSTS)
