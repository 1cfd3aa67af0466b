"""What counts as a credential. Every one here is invented, with the form of a service's and no checksum."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ddlbench.credentials import LEFT_OUT, may_hold_credential
from ddlbench.record.record import Record

A, D, HEX = "A1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q7r8S9t0U1v2W3x4Y5z6", "1234567890", "0123456789abcdef" * 4
# By kind: the value of a variable that is recorded, or a part of one.
CREDENTIALS = {
    "url password": "https://me:hunter2@proxy.example:8080",
    "git url": "git+ssh://deploy:pw@git.example/x",
    "odbc": "Driver=x;Server=db;Uid=me;Pwd=hunter2;",
    "url access_token": f"https://example.org/x?access_token={A[:24]}",
    "url key": f"https://maps.example/x?key={A[:16]}",
    "azure sas": f"https://x.blob.example/y?sv=2022-11-02&sig={A[:30]}%3D",
    "gcs presigned": f"https://storage.example/x?GoogleAccessId=a&Signature={A[:30]}",
    "azure account key": f"DefaultEndpointsProtocol=https;AccountName=x;AccountKey={A[:40]}{A[:46]}==;EndpointSuffix=x",
    "azure shared access": f"Endpoint=sb://x/;SharedAccessKeyName=r;SharedAccessKey={A[:43]}=",
    "export passwd": "ALL,MY_PASSWD=hunter2",
    "export secret": "ALL,CLIENT_SECRET=hunter2",
    "password: ": "user: me, password: hunter2",
    "passphrase": "passphrase='open sesame'",
    "json": '{"user": "me", "password": "hunter2"}',
    "json token": f'{{"auths": {{"nvcr.example": {{"auth": "{A[:24]}"}}}}}}',
    "option": "--password hunter2",
    "option token": f"--token {A[:20]}",
    "option api key": f"--api-key={A[:20]}",
    "curl user": "curl --user me:hunter2 example.org",
    "bearer alone": f"Bearer {A[:30]}",
    "basic": "Authorization: Basic bWU6aHVudGVyMg==",
    "cookie": f"Cookie: session={A[:20]}",
    "pem": "-----BEGIN RSA PRIVATE KEY-----\nMIIE",
    "pgp": "-----BEGIN PGP PRIVATE KEY BLOCK-----",
    "putty": "PuTTY-User-Key-File-2: ssh-rsa",
    "jwt": f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJtZSJ9.{A[:43]}",
    "hf": f"hf_{A[:34]}",
    "hf in a path": f"/data/x:hf_{A[:34]}",
    "github classic": f"ghp_{A[:36]}",
    "github fine": f"github_pat_{A[:22]}_{A[:40]}",
    "gitlab": f"glpat-{A[:20]}",
    "gitlab job": f"glcbt-64_{A[:20]}",
    "aws id": "AKIA" + "ABCDEFGHIJ234567",
    "aws temporary": "ASIA" + "ABCDEFGHIJ234567",
    "slack bot": f"xoxb-{D}12-{D}12-{A[:24]}",
    "slack hook": f"https://hooks.slack.com/services/T{D}/B{D}/{A[:24]}",
    "openai": f"sk-proj-{A[:40]}",
    "google": f"AIza{A[:35]}",
    "google oauth": f"ya29.{A[:40]}",
    "nvidia": f"nvapi-{A[:40]}",
    "npm": f"npm_{A[:36]}",
    "pypi": "pypi-AgEIcHlwaS5vcmc" + A + A,
    "docker": f"dckr_pat_{A[:27]}",
    "vault": f"hvs.{A[:24]}",
    "stripe": f"sk_live_{A[:24]}",
    "sendgrid": f"SG.{A[:22]}.{A[:43]}",
    "digitalocean": f"dop_v1_{HEX}",
    "replicate": f"r8_{A[:37]}",
    "groq": f"gsk_{A[:50]}",
    "slack app": f"xapp-1-{A[:11]}-{D}-{HEX}",
    "discord": f"MTk4{A[:20]}.{A[:6]}.{A[:27]}",
    "telegram": f"{D}:{A[:35]}",
    "twilio": f"SK{HEX[:32]}",
    "square": f"sq0atp-{A[:22]}",
    "artifactory": f"AKC{A}{A[:18]}",
    "databricks": f"dapi{HEX[:32]}",
    "mailgun": f"key-{HEX[:32]}",
    "mailchimp": f"{HEX[:32]}-us12",
    "shopify": f"shpat_{HEX[:32]}",
    "notion": f"secret_{A[:43]}",
    "notion new": f"ntn_{A[:46]}",
    "grafana": f"glsa_{A[:32]}_{HEX[:8]}",
    "tailscale": f"tskey-auth-{A[:11]}-{A[:20]}",
    "sentry": f"sntrys_{A}",
    "export short token": "ALL,HF_TOKEN=abc123",
    "export pat": "ALL,GITHUB_PAT=abc123",
    "export secrets": "ALL,MYSECRETS=abc123",
    "export pwd in a name": "ALL,DBPWD=hunter2",
    "url short token": "https://example.org/x?token=abc",
    "url in a url": "https://login.example/?next=https%3A%2F%2Fme%3Ahunter2%40git.example%2Fx",
    "without a scheme": "me:hunter2@proxy.example:8080",
    "export sshpass": "ALL,SSHPASS=hunter2",
    "curl -u": "curl -u me:hunter2 example.org",
    "sshpass": "sshpass -p hunter2 ssh node1",
    "mysql": "mysql --host=db -phunter2 x",
}
INNOCENT = [
    "a1b2c3d4" * 5, HEX, "sha256:" + HEX, "gcc/12.2.0:openmpi/4.1.5:cuda/12.4",
    "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2", "node[0001-0128,0130]", "GPU-8f6c1d2e-1234-5678-9abc-def012345678",
    "mlx5_0:1,mlx5_1:1", "^lo,docker0", "ALL,OMP_NUM_THREADS=8,NCCL_DEBUG=INFO",
    "ALL,PWD=/home/me,TOKENIZERS_PARALLELISM=false", "ALL,DBUS_SESSION_BUS_ADDRESS=unix:path=/run/user/1/bus",
    "expandable_segments:True,max_split_size_mb:128", "cpu-bind=mask_cpu:0x1,0x2 --mem=0 --gpus-per-node=4 --ntasks=8",
    "2(x3),1", "[fe80::1]:29500", "tcp://10.0.0.1:1234", "https://proxy.example:8080/x?page=2",
    "https://example.org/a@b", "me@example.org",
    "data.tokenize=on_the_fly needs raw text, a.bin is a token file: choose data.tokenize=ahead",
    "no tokenizer in /x: give --tokenizer a folder", "61 of the 256 bytes have no token; give GPT-2's vocab.json",
    "+framework=ddp +model=resnet50 data.root=/data/imagenet train.global_batch=256 seed=0 key=value",
    "data.tokenizer=GPT2 loader.workers=4", "ddp-resnet50-native-4x-1a2b3c4d", "max_tokens: 50257",
    "/p/project/x/.venv/bin/python -m ddlbench +framework=zero3", "BPE-50257-1a2b3c4d", "Basic operations take longer",
    "the bearer of it", "NVIDIA H100 80GB HBM3", "2.14.1+cu130", "monkey=3", "cudnn.key_block=3", "author: me",
    "signal=15", "design=x", "bypass=1", "compass: north", "--keyring x", "key=12",
    "SLURM_CPU_BIND=quiet,mask_cpu:0x0000000000000000FF", "rank 3 exited with -9 at AllReduce, SeqNum=12",
    "C:\\Users\\me", "task_key_frame", "12345678:abcdef", "skip-connections-with-a-very-long-name",
    "risk-averse-optimization-of-things",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "attention.key=4x4 attention.query=4x4",
    "tokens: 50,257; token 12", "loss of token: 3.2", "docker run -u 1000:1000 image", "unk_token=x",
    "OLDPWD=/home/me", "PATH=/usr/bin:/bin", "x_path=3", "https%3A%2F%2Fexample.org%2Fa%40b", "python -u train.py a:b",
    "model.pattern=x", "mysqlclient 2.2.4", "key-value-store", "STOKEN_COUNT=3",
    "ubuntu:24.04@sha256:" + HEX, "10.0.0.1:29500",
]  # fmt: skip


@pytest.mark.parametrize("kind", CREDENTIALS)
def test_a_credential_is_recognized(kind: str) -> None:
    assert may_hold_credential(CREDENTIALS[kind])
    assert may_hold_credential(f"before {CREDENTIALS[kind]}, after")


@pytest.mark.parametrize("text", INNOCENT)
def test_no_other_text_is_taken_for_one(text: str) -> None:
    assert not may_hold_credential(text)


@pytest.mark.parametrize("text", ["a_", "token ", "eyJa", "--user=", " -u a", "mysql ", "%3a%2f%2f", "1"])
def test_the_time_grows_with_the_length_of_a_text_and_no_faster(text: str) -> None:
    """Ten times the length takes ten times as long; a rule that tries every place with every other, a hundred times."""

    def seconds(repeats: int) -> float:
        began = time.process_time()
        assert not may_hold_credential(text * repeats)
        return time.process_time() - began

    assert seconds(20_000) < 40 * min(seconds(2_000) for _ in range(3))


def test_a_record_keeps_none_in_any_section(tmp_path: Path) -> None:
    """Each as a value of the configuration, as a key, in a list, and as a reason."""
    texts = list(CREDENTIALS.values())
    keys = {"workers": 2} | dict.fromkeys(texts, 1)
    sections = {"config": {"data": CREDENTIALS, "loader": keys}, "launch": {"hosts": ["node1", *texts]}}
    record = Record.open(str(tmp_path), "run", sections)
    record.finish("error", f"cannot read {texts[0]}")
    content = json.loads((record.folder / "run.json").read_text())
    assert set(content["config"]["data"].values()) == {LEFT_OUT}
    assert content["config"]["loader"] == {"workers": 2, LEFT_OUT: 1}
    assert content["launch"]["hosts"] == ["node1", *[LEFT_OUT] * len(texts)]
    assert content["reason"] == LEFT_OUT
