"""Guide a translation: forbid a word, continue a given beginning, see what each token was made from.

Start the service with ``make serve``, then run ``python examples/guided_translation.py [ADDRESS]``; it needs
nothing but Python. Attention is a hint, not a dictionary: a pronoun may lean on its verb.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from typing import Any

TEXT = "He began to speak quickly."


def translate(url: str, **more: Any) -> dict[str, Any]:
    """Ask for one translation from English to Portuguese; the answer's only text."""
    body = {"texts": [TEXT], "source": "en", "target": "pt", **more}
    request = urllib.request.Request(
        f"{url}/v1/translate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        text: dict[str, Any] = json.load(response)["texts"][0]
    return text


def main(url: str) -> None:
    """Print four translations of one sentence."""
    print("free:             ", translate(url)["text"])
    print("without 'começou':", translate(url, options={"forbidden": ["começou"]})["text"])
    print("from 'Ela ':      ", translate(url, target_prefixes=["Ela "])["text"])
    (segment,) = translate(url, options={"alignment": True})["segments"]
    alignment = segment["alignment"]
    print("made from:")
    for token, weights in zip(alignment["target_tokens"], alignment["weights"], strict=True):
        strongest = max(range(len(weights)), key=weights.__getitem__)
        print(f"  {token:>12}  {alignment['source_tokens'][strongest]:<10} {weights[strongest]:.2f}")


if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    try:
        main(address)
    except urllib.error.URLError as error:
        sys.exit(f"no service answers at {address} ({error.reason}); run `make serve`, or name its address")
