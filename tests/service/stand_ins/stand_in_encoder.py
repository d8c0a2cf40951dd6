"""The encoder process with limits that a test meets in a moment."""

import os
import sys

from photon_grpc.service.processes import encoder

encoder.MAX_CPU_S = float(os.environ.get("STAND_IN_CPU_S", encoder.MAX_CPU_S))
encoder.MAX_MEMORY_BYTES = encoder.MAX_SMALL_MEMORY_BYTES = int(
    os.environ.get("STAND_IN_MEMORY_BYTES", encoder.MAX_MEMORY_BYTES)
)

if __name__ == "__main__":
    sys.exit(encoder.main(sys.argv))
