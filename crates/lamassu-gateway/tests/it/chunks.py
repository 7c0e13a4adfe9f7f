"""Requests that no library makes: signed by hand, chunk by chunk, and then altered. `chunks.py NAME` runs one of the functions below."""

import base64
import hashlib
import hmac
import http.client
import os
import re
import sys
import time
import urllib.parse
import zlib

ADDRESS = urllib.parse.urlsplit(os.environ["GATEWAY_URL"]).netloc
SECRET = "alice-secret-alice-secret"
SIGNED, TRAILER = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"
UNSIGNED = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
EMPTY = hashlib.sha256(b"").hexdigest()


class Signing:
    """The signature of a request, and those of the chunks behind it."""

    def __init__(self, method, path, headers, signed=None):
        self.date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self.scope = f"{self.date[:8]}/us-east-1/s3/aws4_request"
        self.key = ("AWS4" + SECRET).encode()
        for part in self.scope.split("/"):
            self.key = hmac.new(self.key, part.encode(), "sha256").digest()
        self.headers = {"host": ADDRESS, "x-amz-date": self.date, **headers}
        self.names = sorted(self.headers if signed is None else signed)
        path, _, query = path.partition("?")
        query = "&".join(sorted(one if "=" in one else one + "=" for one in query.split("&") if one))
        lines = [method, path, query, *(f"{name}:{self.headers[name]}" for name in self.names), "",
                 ";".join(self.names), headers["x-amz-content-sha256"]]
        request = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        self.last = self.sign("AWS4-HMAC-SHA256", self.date, self.scope, request)
        self.headers["authorization"] = self.authorization(self.names)

    def sign(self, *lines):
        return hmac.new(self.key, "\n".join(lines).encode(), "sha256").hexdigest()

    def authorization(self, names):
        return f"AWS4-HMAC-SHA256 Credential=ALICE/{self.scope},SignedHeaders={';'.join(names)},Signature={self.last}"

    def chunk(self, data):
        before, self.last = self.last, None
        self.last = self.sign("AWS4-HMAC-SHA256-PAYLOAD", self.date, self.scope, before, EMPTY, hashlib.sha256(data).hexdigest())
        return b"%x;chunk-signature=%s\r\n%s\r\n" % (len(data), self.last.encode(), data)

    def trailer(self, name, value):
        end = self.chunk(b"")[:-2]
        line = f"{name}:{value}\n"
        self.last = self.sign("AWS4-HMAC-SHA256-TRAILER", self.date, self.scope, self.last, hashlib.sha256(line.encode()).hexdigest())
        return end, f"{name}:{value}\r\n".encode(), f"x-amz-trailer-signature:{self.last}\r\n\r\n".encode()


def ask(method, path, headers, body=b""):
    """Status, code of the error if there is one, and what came."""
    connection = http.client.HTTPConnection(ADDRESS, timeout=120)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    connection.send(body)
    answer = connection.getresponse()
    said = answer.read()
    code = re.search(rb"<Code>(\w+)</Code>", said)
    return answer.status, code.group(1).decode() if code else "", said


def plain(method, path, body=b"", **headers):
    return ask(*signed(method, path, body, **headers), body)


def signed(method, path, body=b"", **headers):
    headers = {"x-amz-content-sha256": hashlib.sha256(body).hexdigest(), "content-length": str(len(body)), **headers}
    return method, path, Signing(method, path, headers).headers


def in_chunks(kind, path, data, size, more={}):
    """A signing, and the chunks without the last one."""
    headers = {"x-amz-content-sha256": kind, "x-amz-decoded-content-length": str(len(data)), "content-encoding": "aws-chunked", **more}
    signing = Signing("PUT", path, headers)
    pieces = [data[at:at + size] for at in range(0, len(data), size)]
    return signing, [signing.chunk(piece) for piece in pieces] if kind != UNSIGNED else [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces]


def put(path, signing, parts):
    body = b"".join(parts)
    return ask("PUT", path, {**signing.headers, "content-length": str(len(body))}, body)[:2]


def flipped(chunk, at):
    return chunk[:at] + bytes([chunk[at] ^ 1]) + chunk[at + 1:]


DATA = hashlib.sha256(b"x").digest() * 6144 + b"end"
WRONG = (403, "SignatureDoesNotMatch")
CUT = (400, "IncompleteBody")


def prepared(bucket):
    assert plain("PUT", f"/{bucket}")[0] == 200
    path = f"/{bucket}/k"
    assert plain("PUT", path, b"kept")[0] == 200
    return path


def kept(path):
    assert plain("GET", path)[2] == b"kept", "what is refused changes nothing"


def signed_chunks():
    path = prepared("alice-chunks")
    good = lambda: in_chunks(SIGNED, path, DATA, 65536)
    signing, chunks = good()
    assert len(chunks) == 4
    foreign = in_chunks(SIGNED, "/alice-chunks/other", DATA, 65536)[1]
    for what, alter, means in [
        ("data are changed", lambda c: [c[0], flipped(c[1], len(c[1]) // 2), *c[2:]], WRONG),
        ("the last byte is changed", lambda c: [*c[:3], flipped(c[3], len(c[3]) - 3), c[4]], WRONG),
        ("a signature is changed", lambda c: [c[0], flipped(c[1], 30), *c[2:]], WRONG),
        ("the first is dropped", lambda c: c[1:], WRONG),
        ("one in the middle is dropped", lambda c: [c[0], *c[2:]], WRONG),
        ("the last with data is dropped", lambda c: [*c[:3], c[4]], WRONG),
        ("all are dropped", lambda c: c[4:], WRONG),
        ("two are exchanged", lambda c: [c[0], c[2], c[1], *c[3:]], WRONG),
        ("one is there twice", lambda c: [c[0], c[1], c[1], *c[3:]], WRONG),
        ("one is of another request", lambda c: [foreign[0], *c[1:]], WRONG),
        ("the end is not signed", lambda c: [*c[:4], b"0\r\n\r\n"], CUT),
        ("one is not signed", lambda c: [b"10000\r\n" + c[0][-65538:], *c[1:]], CUT),
        ("the end is not there", lambda c: c[:4], CUT),
        ("cut within a chunk", lambda c: [*c[:2], c[2][:1000]], CUT),
        ("cut within the line of the end", lambda c: [*c[:4], c[4][:5]], CUT),
        ("nothing", lambda c: [], CUT),
    ]:
        signing, chunks = good()
        said = put(path, signing, alter([*chunks, signing.chunk(b"")]))
        assert said == means, (what, said)
        kept(path)
    signing, chunks = good()
    assert put(path, signing, [*chunks, signing.chunk(b"")]) == (200, "")
    assert plain("GET", path)[2] == DATA


def trailers():
    path = prepared("alice-trailers")
    crc = base64.b64encode(zlib.crc32(DATA).to_bytes(4, "big")).decode()
    zeros = base64.b64encode(bytes(4)).decode()
    name = "x-amz-checksum-crc32"
    for what, said_crc, alter, means in [
        ("the checksum is changed", crc, lambda t: [t[0], t[1].replace(crc.encode(), zeros.encode()), t[2]], WRONG),
        ("its signature is changed", crc, lambda t: [*t[:2], flipped(t[2], 30)], WRONG),
        ("its signature is dropped", crc, lambda t: [*t[:2], b"\r\n"], CUT),
        ("the checksum is dropped", crc, lambda t: [t[0], t[2]], WRONG),
        ("both are dropped", crc, lambda t: [t[0], b"\r\n"], CUT),
        ("the end is dropped", crc, lambda t: [], CUT),
        ("a wrong one is signed", zeros, lambda t: t, (400, "BadDigest")),
    ]:
        signing, chunks = in_chunks(TRAILER, path, DATA, 65536, {"x-amz-trailer": name})
        said = put(path, signing, [*chunks, *alter(signing.trailer(name, said_crc))])
        assert said == means, (what, said)
        kept(path)
    unsigned = {"x-amz-trailer": name}
    end, line = b"0\r\n", f"{name}:{crc}\r\n\r\n".encode()
    for what, alter, means in [
        ("the end is dropped", lambda c: c, CUT),
        ("the checksum is dropped", lambda c: [*c, end, b"\r\n"], CUT),
        ("a chunk is dropped", lambda c: [*c[1:], end, line], CUT),
        ("two are exchanged", lambda c: [c[1], c[0], *c[2:], end, line], (400, "BadDigest")),
        ("it is there twice", lambda c: [*c, end, line[:-2], line], CUT),
        ("a wrong one follows", lambda c: [*c, end, line[:-2], f"X-Amz-Checksum-CRC32:{zeros}\r\n\r\n".encode()], CUT),
        ("its line does not end", lambda c: [*c, end, line[:-4]], CUT),
    ]:
        signing, chunks = in_chunks(UNSIGNED, path, DATA, 65536 - 32 + 5, unsigned)
        said = put(path, signing, alter(chunks))
        assert said == means, (what, said)
        kept(path)
    signing, chunks = in_chunks(UNSIGNED, path, DATA, 65536, unsigned)
    assert put(path, signing, [*chunks, end, line]) == (200, "")
    signing, chunks = in_chunks(TRAILER, path, DATA, 65536, {"x-amz-trailer": name})
    assert put(path, signing, [*chunks, *signing.trailer(name, crc)]) == (200, "")
    assert plain("GET", path)[2] == DATA


def documents():
    """What a request says of its document, besides the signature."""
    path = prepared("alice-documents")
    document = b"<Delete><Object><Key>k</Key></Object></Delete>"
    at, md5 = "/alice-documents?delete", lambda data: base64.b64encode(hashlib.md5(data).digest()).decode()
    crc = lambda data: base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
    for said, means in [
        ({"content-md5": md5(b"other")}, "BadDigest"),
        ({"content-md5": "x"}, "InvalidDigest"),
        ({"x-amz-checksum-crc32": crc(b"other")}, "BadDigest"),
        ({"content-md5": md5(document), "x-amz-checksum-crc32": crc(b"other")}, "BadDigest"),
    ]:
        assert plain("POST", at, document, **said)[:2] == (400, means), said
        kept(path)
    # Nothing in place of what was signed.
    _, _, headers = signed("POST", at, document)
    nothing = {"x-amz-content-sha256": hashlib.sha256(document).hexdigest(), "content-length": "0"}
    for where, method in ((at, "POST"), (path + "?tagging", "PUT")):
        assert ask(method, where, Signing(method, where, nothing).headers, b"")[:2] == (400, "XAmzContentSHA256Mismatch")
    assert plain("POST", at, b"")[:2] == (400, "MissingRequestBodyError")
    for character in (b"&#0;", b"&#1;"):
        assert plain("POST", at, document.replace(b"k", character))[:2] == (400, "MalformedXML"), character
    # What a document cannot say.
    for asked in ("prefix=%00", "delimiter=%01", "list-type=2&start-after=%00", "marker=%00", "uploads&prefix=%00", "uploads&key-marker=a&upload-id-marker=%00", "versions&key-marker=%00"):
        assert plain("GET", "/alice-documents?" + asked)[:2] == (400, "InvalidArgument"), asked
    status, _, said = plain("GET", "/alice-documents?encoding-type=url&prefix=%00")
    assert status == 200 and b"<Prefix>%00</Prefix>" in said, said
    kept(path)
    assert plain("POST", at, document, **{"content-md5": md5(document), "x-amz-checksum-crc32": crc(document)})[0] == 200
    assert plain("GET", path)[0] == 404


def stripped():
    """Whoever alters a request on its way cannot do it by what the signature is said to cover."""
    path = prepared("alice-stripped")
    refused = lambda said: said[0] in (400, 403)
    more = {"x-amz-meta-a": "b", "content-type": "text/plain"}
    _, _, headers = signed("PUT", path, b"new", **more)
    names = re.search("SignedHeaders=([^,]*)", headers["authorization"]).group(1).split(";")
    assert set(names) == {"content-length", "content-type", "host", "x-amz-content-sha256", "x-amz-date", "x-amz-meta-a"}
    with_names = lambda names: {**headers, "authorization": re.sub("SignedHeaders=[^,]*", "SignedHeaders=" + ";".join(names), headers["authorization"])}
    # Of a good request: one name less, none, all but host, twice the same; and the header dropped with its name.
    for one in names:
        less = [name for name in names if name != one]
        assert refused(ask("PUT", path, with_names(less), b"new")), one
        if one not in ("host", "content-length"):
            altered = with_names(less)
            del altered[one]
            assert refused(ask("PUT", path, altered, b"new")), one
    for some in ([], ["host"], ["host", "host"], [*names, "x-amz-acl"]):
        assert refused(ask("PUT", path, with_names(some), b"new")), some
    without = {**headers, "authorization": re.sub("SignedHeaders=[^,]*,", "", headers["authorization"])}
    assert refused(ask("PUT", path, without, b"new"))
    assert refused(ask("PUT", path, {**headers, "authorization": headers["authorization"].split(",Signature")[0]}, b"new"))
    # Added behind the signer's back: what is not signed is not there.
    for name, value in (("x-amz-copy-source", "/alice-stripped/k"), ("x-amz-acl", "private"), ("x-amz-meta-c", "d"), ("x-amz-tagging", "a=b")):
        assert refused(ask("PUT", path, {**headers, name: value}, b"new")), name
    # A good signature that covers too little.
    hashed = {"x-amz-content-sha256": hashlib.sha256(b"new").hexdigest(), "content-length": "3"}
    for covered in (["host"], ["host", "x-amz-date"], ["host", "x-amz-content-sha256"], ["x-amz-date", "x-amz-content-sha256"]):
        assert refused(ask("PUT", path, Signing("PUT", path, hashed, covered).headers, b"new")), covered
    # Other content than was signed.
    assert ask("PUT", path, headers, b"NEW")[:2] == (400, "XAmzContentSHA256Mismatch")
    document = b"<Delete><Object><Key>k</Key></Object></Delete>"
    covering = {"x-amz-content-sha256": hashlib.sha256(document).hexdigest(), "content-length": str(len(document))}
    names = ["host", "x-amz-content-sha256", "x-amz-date"]
    deletion = Signing("POST", path.rsplit("/", 1)[0] + "?delete", covering, names)
    assert ask("POST", path.rsplit("/", 1)[0] + "?delete", deletion.headers, document.replace(b"k", b"K"))[:2] == (400, "XAmzContentSHA256Mismatch")
    kept(path)
    assert ask("PUT", path, Signing("PUT", path, hashed, ["host", "x-amz-content-sha256", "x-amz-date"]).headers, b"new")[0] == 200


def decoys():
    """`Authorization` itself is not signed: whoever has a signed request may write there what they like, and add headers."""
    path = prepared("alice-decoys")
    assert plain("PUT", "/alice-decoys/private", b"secret")[0] == 200
    _, _, headers = signed("PUT", path)
    good = headers["authorization"]
    copied = {**headers, "x-amz-copy-source": "/alice-decoys/private"}
    decoy = "SignedHeaders=content-length;host;x-amz-content-sha256;x-amz-copy-source;x-amz-date"
    for altered in (good.replace(" ", f",{decoy} ", 1), good.replace(" ", f" {decoy},", 1), f"{decoy},{good}", f"{good},{decoy}"):
        assert ask("PUT", path, {**copied, "authorization": altered})[:2] == (400, "AuthorizationHeaderMalformed"), altered
        kept(path)
    # The library verifies a signature without values that are not UTF-8.
    altered = re.sub("(SignedHeaders=[^,]*)", r"\1;x-amz-meta-a", good)
    assert ask("PUT", path, {**headers, "x-amz-meta-a": "\xff", "authorization": altered})[:2] == (400, "InvalidRequest")
    kept(path)
    # Spaces are up to the client.
    assert ask("PUT", path, {**headers, "authorization": good.replace(" ", "  ").replace(",", ", ")})[0] == 200
    assert plain("GET", path)[2] == b""


if __name__ == "__main__":
    globals()[sys.argv[1]]()
