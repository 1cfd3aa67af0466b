"""Credentials in texts that are to be recorded: recognized by the name before a value, or by the form of a token.

Random characters alone are none: commits, checksums and the numbers of GPUs look the same.
"""

from __future__ import annotations

import re

LEFT_OUT = "(left out: it may hold a credential)"
# What the name of a value ends with: HF_TOKEN=..., "password": "...", X-Amz-Signature=..., --api-key ...
_LONG = r"authorization|cookie|credentials?|jwt|passphrase|passw(?:or)?d|secrets?|signature"
_KEYS = r"(?:access|account|api|auth|client|encryption|license|master|private|secret|signing|ssh|subscription)[_-]?key"
_SHORT = r"(?<![a-z])(?:auth|pass|sig)|sshpass|pwd(?!\s*=\s*/)|_pat"  # PWD=/home/me is a folder
_NAME = rf"(?:{_LONG}|{_KEYS}|{_SHORT}|(?:session|token)(?=\W+\S{{8}})|(?-i:TOKEN))"
# How the tokens of services begin that machine learning and clusters use.
_TOKENS = (
    r"hf_[a-z0-9]{30}", r"gh[oprsu]_\w{30}", r"github_pat_\w{30}", r"gl(?:cbt|dt|ft|imt|pat|ptt|rt|soat)-[\w-]{20}",
    r"xox[a-z]-[\w-]{10}", r"a[ks]ia[0-9a-z]{16}(?!\w)", r"sk-(?=\S{0,60}\d)[\w-]{32}", r"[rs]k_live_\w{20}",
    r"aiza[\w-]{35}", r"ya29\.[\w-]{20}", r"nvapi-[\w-]{20}", r"npm_[a-z0-9]{36}", r"pypi-age[\w-]{20}",
    r"dckr_pat_[\w-]{20}", r"hv[brs]\.[\w-]{20}", r"sg\.[\w-]{20,24}\.", r"dop_v1_\w{30}", r"r8_\w{30}", r"gsk_\w{40}",
    r"eyj[\w-]{10,500}\.", r"xapp-\d-\w{8}", r"[mno][\w-]{23,25}\.[\w-]{6}\.[\w-]{27}", r"\d{8,10}:[\w-]{35}",
    r"(?:ac|sk)[0-9a-f]{32}(?!\w)", r"sq0[a-z]{3}-[\w-]{22}", r"akc[a-z0-9]{60}", r"dapi[0-9a-f]{32}",
    r"key-[0-9a-f]{32}", r"[0-9a-f]{32}-us\d", r"shp[a-z]{2}_[0-9a-f]{32}", r"secret_\w{40}", r"ntn_\w{40}",
    r"gl(?:c|sa)_\w{32}", r"tskey-[\w-]{20}", r"sntry[su]_[\w+/=-]{30}",
)  # fmt: skip
_CREDENTIAL = re.compile(
    "|".join(
        [
            r"://[^/\s]*@",  # scheme://user:password@host, scheme://token@host
            r"(?<![\w@/.+:-])[\w.+-]{1,64}:[^\s:@/,]{1,100}@(?!sha)\w",  # user:password@host, no image:tag@sha256
            rf"""{_NAME}["']?\s*[=:]\s*["']?[^\s"',;&]""",
            rf"--[a-z-]{{0,20}}(?:{_LONG}|{_KEYS}|token)\s+\S",
            r"%3a%2f%2f(?:(?!%2f)\S){1,500}%40",
            r"(?:--user[= ]|\s-u ?)(?!\d+:\d)[^\s:]{1,100}:\S",
            r"\b(?:sshpass|mysql\w{0,10})\s[^\n]{0,200}-p ?\S",
            r"[a-z0-9]_key=\S{8}",
            r"[?&](?:key|token)=\S",
            r"\bbearer\s+[\w.~+/=-]{16}",
            r"private key(?: block)?-----|putty-user-key-file",
            rf"(?<![a-z0-9])(?:{'|'.join(_TOKENS)})",
            r"hooks\.slack\.com/services/",
        ]
    ),
    re.IGNORECASE,
)


def may_hold_credential(text: str) -> bool:
    """Whether a text looks as if it held a password, a token or a private key."""
    return _CREDENTIAL.search(text) is not None
