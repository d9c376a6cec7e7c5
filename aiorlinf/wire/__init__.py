"""What travels between two workers, as bytes: frames, handshake, object tree, manifest. Pure: no sockets, no clock."""
