"""Whose a call is."""

from __future__ import annotations

import grpc
import pytest

from common.errors import ApiError
from router.tenants import TENANT_KEY, tenant_of

NAMED = [("other", "x"), (TENANT_KEY, "gold")]


@pytest.mark.parametrize(
    ("metadata", "bound", "tenant"),
    [
        (None, "", ""),
        ([], "", ""),
        (NAMED, "", "gold"),
        ([], "gold", "gold"),
        (NAMED, "gold", "gold"),
        ([(TENANT_KEY, b"gold")], "gold", "gold"),
        ([(TENANT_KEY, "")], "gold", "gold"),
    ],
)
def test_the_tenant_is_the_keys_or_the_metadatas(
    metadata: list[tuple[str, str | bytes]] | None, bound: str, tenant: str
) -> None:
    assert tenant_of(metadata, TENANT_KEY, bound) == tenant


def test_metadata_can_not_change_the_tenant_of_a_key() -> None:
    with pytest.raises(ApiError, match=f"metadata {TENANT_KEY} is 'gold'; the API key is of tenant 'silver'") as caught:
        tenant_of(NAMED, TENANT_KEY, "silver")
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.PERMISSION_DENIED, "TENANT_MISMATCH")
