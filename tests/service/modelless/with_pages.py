"""`photon-grpc`, whose services have the engine and the front ends beside this file.

python -m tests.service.modelless.with_pages serve --model DIRECTORY --load-format dummy --http-listen 127.0.0.1:0
"""

from __future__ import annotations

import sys
from functools import partial

from photon_grpc.cli.main import main
from photon_grpc.service import supervisor

supervisor.Supervisor = partial(  # type: ignore[misc,assignment]
    supervisor.Supervisor,
    engine="tests.service.modelless.engine",
    frontend="tests.service.modelless.pages_frontend",
)
sys.exit(main(sys.argv[1:]))
