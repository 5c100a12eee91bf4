"""What an error says reaches the client whatever it holds."""

import json

from app.api.errors import Dialect, error_response
from app.errors import BundleCorrupt


def test_a_file_name_that_is_no_utf8_is_written_with_escapes() -> None:
    name = b"bundles/\xff".decode("utf-8", "surrogateescape")
    for dialect in Dialect:
        body = bytes(error_response(BundleCorrupt(f"{name} is damaged"), dialect).body)
        answer = json.loads(body)["error"]
        message = answer["message"] if dialect is Dialect.NATIVE else answer
        assert message == "bundles/\\udcff is damaged"
