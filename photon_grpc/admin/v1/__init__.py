"""Generated from protos/photon_grpc/admin/v1 by protos/generate.py. Import the modules; nothing is re-exported here."""
