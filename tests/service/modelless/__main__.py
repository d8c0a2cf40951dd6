"""`photon-grpc`, whose services have the engine beside this file.

python -m tests.service.modelless serve --model DIRECTORY --load-format dummy
"""

from __future__ import annotations

import sys
from functools import partial

from photon_grpc.cli.main import main
from photon_grpc.service import supervisor

supervisor.Supervisor = partial(supervisor.Supervisor, engine="tests.service.modelless.engine")  # type: ignore[misc,assignment]
sys.exit(main(sys.argv[1:]))
