"""`python -m photon_grpc` is `photon-grpc`."""

import sys

from photon_grpc.cli.main import main

sys.exit(main())
