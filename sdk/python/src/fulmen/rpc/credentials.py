"""TLS files as gRPC credentials."""

import grpc

from fulmen.rpc.tls import TlsMaterial


def channel_credentials(material: TlsMaterial) -> grpc.ChannelCredentials:
    """Returns the credentials of a client."""
    return grpc.ssl_channel_credentials(material.ca, material.key, material.certificate)
