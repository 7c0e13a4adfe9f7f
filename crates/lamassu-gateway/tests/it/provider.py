"""What lines of the tests of `provider.rs` begin with: a client of a credential, and what is expected of calls."""
import boto3, json, os, time, urllib.error, urllib.request
from botocore.client import Config
from botocore.exceptions import ClientError, ConnectionClosedError, ResponseStreamingError

URL = os.environ["URL"]
ISSUED = json.loads(os.environ["ISSUED"])


def client(said, **other):
    said = {**said, **other}
    config = Config(signature_version="s3v4", retries={"max_attempts": 0}, s3={"addressing_style": "path"})
    return boto3.client("s3", endpoint_url=URL, config=config, aws_access_key_id=said["AccessKeyId"],
                        aws_secret_access_key=said["SecretAccessKey"], aws_session_token=said["SessionToken"])


def code_of(call, **what):
    try:
        call(**what)
    except ClientError as error:
        return error.response["Error"]["Code"], error.response["ResponseMetadata"]["HTTPStatusCode"]
    return ("ok", 200)


def fails(code, call, **what):
    found = code_of(call, **what)
    assert code in found, (found, code)


def becomes(code, before, call, **what):
    """Answers `before` until it answers `code`."""
    for _ in range(1200):
        try:
            found = code_of(call, **what)
        except (ConnectionClosedError, ResponseStreamingError):
            continue  # An answer that had begun was cut off.
        if code in found:
            return
        assert before in found, (found, code)
        time.sleep(0.1)
    raise AssertionError(f"it does not become {code}")


def ask(url, headers={}):
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers)).status, ""
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def captured(call, **what):
    """The address and the headers of a request, which is made."""
    seen = []
    s3.meta.events.register("before-send.s3", lambda request, **_: seen.append(request))
    call(**what)
    text = lambda value: value.decode() if isinstance(value, bytes) else value
    return seen[0].url, {text(name): text(value) for name, value in seen[0].headers.items()}


s3 = client(ISSUED)
