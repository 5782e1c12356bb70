"""Opens the link that the settings select."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from torch import nn

from fulmen.rpc.channel import FulmenChannel, Token
from fulmen.watched_file import WatchedFile
from fulmen_exchange.layout import Layout
from fulmen_exchange.links.grpc_link import GrpcLink, GrpcParticipant
from fulmen_exchange.links.grpc_server import dial
from fulmen_exchange.links.link import Link
from fulmen_exchange.links.settings import GrpcLinkSettings, ServerAccess, TorchLinkSettings
from fulmen_exchange.links.torch_link import TorchLink
from fulmen_exchange.ranks import Ranks
from fulmen_exchange.registry import make_codec
from fulmen_exchange.settings import CodecSettings


def open_link(
    settings: CodecSettings,
    *,
    parameters: Mapping[str, nn.Parameter],
    ranks: Ranks,
    access: ServerAccess | None = None,
) -> Link:
    """Opens the link of a group of ranks, all of which call this.

    Args:
        settings: Settings of the codec, including those of the link.
        parameters: Trainable parameters by name, the same on every rank.
        ranks: This rank among the others.
        access: Credentials for servers of shards; None if the link has none.

    Raises:
        ExchangeFailed: if a server refuses the rank or cannot be reached within the deadline.
    """
    match settings.link:
        case TorchLinkSettings():
            return TorchLink(ranks)
        case GrpcLinkSettings() as link:
            if access is None:
                raise AssertionError("a grpc link requires access to its servers")
            who = GrpcParticipant(
                training_run=access.training_run,
                rank=ranks.rank,
                world_size=ranks.world_size,
                layout=Layout.of(list(parameters.items()), settings, shards=len(link.targets)),
                codec=make_codec(settings),
                codec_settings=settings,
                device=ranks.device,
            )
            return GrpcLink.open(who, link, connect=lambda target: connected(access, target))
        case _:
            assert_never(settings.link)


def connected(access: ServerAccess, target: str) -> FulmenChannel:
    """Opens the channel to a server of shards, with TLS if there are certificates for it."""
    file = WatchedFile(access.token_file) if access.token_file else None
    token: Token = (access.token or None) if file is None else lambda: file.content().decode()
    return dial(target, token=token, tls=access.tls.get(target))
