"""What a gateway promises of objects, checked by boto3. `boto.py NAME` runs one of the functions below."""

import base64
import hashlib
import os
import re
import sys
import time
import urllib.error
import urllib.request
import zlib
from concurrent.futures import ThreadPoolExecutor

import boto3
from botocore.client import Config
from botocore.exceptions import ClientError

URL = os.environ["GATEWAY_URL"]


def client(access="ALICE", secret="alice-secret-alice-secret", **options):
    config = Config(signature_version="s3v4", retries={"max_attempts": 1}, s3={"addressing_style": "path"}, **options)
    return boto3.client("s3", endpoint_url=URL, aws_access_key_id=access, aws_secret_access_key=secret,
                        region_name="us-east-1", config=config)


def fails(code, call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except ClientError as error:
        found = error.response["Error"]["Code"]
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        assert code in (found, status), f"{found} {status} in place of {code}: {error}"
        return error
    raise AssertionError(f"{call} {kwargs} did not fail with {code}")


def noise(size, seed=b"x"):
    blocks = (hashlib.sha256(seed + str(at).encode()).digest() for at in range((size + 31) // 32))
    return b"".join(blocks)[:size]


def buckets(query):
    """This boto3 knows no pages of buckets: names, and the token of the next page; or the error."""
    def ask(params, **_):
        params["url"] += "?" + query
    own, raw = client(), []
    own.meta.events.register("before-call.s3.ListBuckets", ask)
    own.meta.events.register("response-received.s3.ListBuckets", lambda response_dict, **_: raw.append(response_dict["body"].decode()))
    try:
        names = [bucket["Name"] for bucket in own.list_buckets()["Buckets"]]
    except ClientError as error:
        return error.response["Error"]["Code"]
    token = re.search("<ContinuationToken>(.*)</ContinuationToken>", raw[-1])
    return names, token and token[1]


def objects():
    s3 = client()
    s3.create_bucket(Bucket="alice-1")
    fails("BucketAlreadyOwnedByYou", s3.create_bucket, Bucket="alice-1")
    assert [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]] == ["alice-1"]
    # In pages, by name.
    for name in ("alice-3", "alice-2"):
        s3.create_bucket(Bucket=name)
    assert buckets("max-buckets=2") == (["alice-1", "alice-2"], "alice-2")
    assert buckets("max-buckets=2&continuation-token=alice-2") == (["alice-3"], None)
    assert buckets("prefix=alice-2") == (["alice-2"], None)
    assert buckets("max-buckets=0") == buckets("max-buckets=10001") == "InvalidArgument"
    for name in ("alice-3", "alice-2"):
        s3.delete_bucket(Bucket=name)
    fails(404, s3.head_bucket, Bucket="alice-2")
    assert s3.get_bucket_location(Bucket="alice-1")["LocationConstraint"] is None
    # Sizes at the borders of blocks, pages and pieces.
    for size in [0, 1, 31, 32, 4095, 4096, 4097, 116 * 4096, 116 * 4096 + 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 5000000]:
        body = noise(size)
        put = s3.put_object(Bucket="alice-1", Key=f"sizes/{size}", Body=body)
        assert put["ETag"] == f'"{hashlib.md5(body).hexdigest()}"', size
        got = s3.get_object(Bucket="alice-1", Key=f"sizes/{size}")
        assert got["Body"].read() == body and got["ContentLength"] == size and got["ETag"] == put["ETag"], size
    body = noise(5000000)
    key = {"Bucket": "alice-1", "Key": "sizes/5000000"}
    for first, last in [(0, 0), (1, 5), (4090, 4100), (1048570, 1048590), (4999999, 6000000), (0, 4999999)]:
        got = s3.get_object(**key, Range=f"bytes={first}-{last}")
        assert got["Body"].read() == body[first:last + 1]
        assert got["ContentRange"] == f"bytes {first}-{min(last, 4999999)}/5000000"
    assert s3.get_object(**key, Range="bytes=-7")["Body"].read() == body[-7:]
    assert s3.get_object(**key, Range="bytes=4999990-")["Body"].read() == body[-10:]
    fails("InvalidRange", s3.get_object, **key, Range="bytes=5000000-")
    # What is given comes back, and lasts.
    s3.put_object(Bucket="alice-1", Key="m", Body=b"m", Metadata={"colour": "blue", "n": "1"}, ContentType="text/plain",
                  ContentEncoding="identity", CacheControl="no-cache", ContentDisposition="inline", ContentLanguage="de",
                  Tagging="a=1&b=2")
    head = s3.head_object(Bucket="alice-1", Key="m")
    assert head["Metadata"] == {"colour": "blue", "n": "1"} and head["ContentType"] == "text/plain"
    assert (head["CacheControl"], head["ContentDisposition"], head["ContentLanguage"]) == ("no-cache", "inline", "de")
    got = s3.get_object(Bucket="alice-1", Key="m", ResponseContentType="image/png")
    assert got["ContentType"] == "image/png" and got["TagCount"] == 2
    assert head["ResponseMetadata"]["HTTPHeaders"]["x-amz-tagging-count"] == "2"
    tags = lambda: {tag["Key"]: tag["Value"] for tag in s3.get_object_tagging(Bucket="alice-1", Key="m")["TagSet"]}
    assert tags() == {"a": "1", "b": "2"}
    s3.put_object_tagging(Bucket="alice-1", Key="m", Tagging={"TagSet": [{"Key": "c", "Value": "3"}]})
    assert tags() == {"c": "3"}
    assert s3.head_object(Bucket="alice-1", Key="m")["ETag"] == head["ETag"]
    s3.delete_object_tagging(Bucket="alice-1", Key="m")
    assert tags() == {}
    fails("MetadataTooLarge", s3.put_object, Bucket="alice-1", Key="m", Body=b"", Metadata={"a": "x" * 2100})
    # Conditions.
    tag = head["ETag"]
    fails(304, s3.get_object, Bucket="alice-1", Key="m", IfNoneMatch=tag)
    fails(412, s3.get_object, Bucket="alice-1", Key="m", IfMatch='"other"')
    assert s3.get_object(Bucket="alice-1", Key="m", IfMatch=tag)["Body"].read() == b"m"
    fails(304, s3.get_object, Bucket="alice-1", Key="m", IfModifiedSince=head["LastModified"])
    fails(412, s3.get_object, Bucket="alice-1", Key="m", IfUnmodifiedSince="2001-01-01")
    # Replaced whole; gone; gone again.
    s3.put_object(Bucket="alice-1", Key="m", Body=b"new")
    assert s3.get_object(Bucket="alice-1", Key="m")["Body"].read() == b"new"
    assert s3.head_object(Bucket="alice-1", Key="m")["Metadata"] == {}
    s3.delete_object(Bucket="alice-1", Key="m")
    s3.delete_object(Bucket="alice-1", Key="m")
    fails("NoSuchKey", s3.get_object, Bucket="alice-1", Key="m")
    fails("BucketNotEmpty", s3.delete_bucket, Bucket="alice-1")
    keys = [{"Key": item["Key"]} for item in s3.list_objects_v2(Bucket="alice-1")["Contents"]] + [{"Key": "none"}]
    gone = s3.delete_objects(Bucket="alice-1", Delete={"Objects": keys})
    assert len(gone["Deleted"]) == len(keys) and "Errors" not in gone
    s3.delete_bucket(Bucket="alice-1")
    assert s3.list_buckets()["Buckets"] == []


def keys():
    s3 = client()
    s3.create_bucket(Bucket="alice-k")
    put = lambda key, body=b"x": s3.put_object(Bucket="alice-k", Key=key, Body=body)
    long = "/".join(["d" * 250] * 4)
    good = ["a b+c", "ü/ö/ß", "%2F", "a&b=c", "\u3042", "back\\slash", "quote'\"<>", "x" * 255, long, "...", ".hidden",
            "line\tbreak"]
    for key in good:
        put(key, key.encode())
    for key in good:
        assert s3.get_object(Bucket="alice-k", Key=key)["Body"].read() == key.encode(), key
    listed = [item["Key"] for item in s3.list_objects_v2(Bucket="alice-k")["Contents"]]
    assert listed == sorted(good, key=lambda key: key.encode()), listed
    for key, code in [("a//b", "InvalidArgument"), ("/a", "InvalidArgument"), ("a/../b", "InvalidArgument"),
                      ("./a", "InvalidArgument"), (".lamassu-put-1", "InvalidArgument"), ("y" * 256, "KeyTooLongError"),
                      ("z/" * 513, "KeyTooLongError")]:
        fails(code, put, key)
        assert [item["Key"] for item in s3.list_objects_v2(Bucket="alice-k")["Contents"]] == listed
    # A file is no directory.
    put("f")
    fails(409, put, "f/below")
    put("d/below")
    fails(409, put, "d")
    assert s3.get_object(Bucket="alice-k", Key="f")["Body"].read() == b"x"
    fails("NoSuchKey", s3.get_object, Bucket="alice-k", Key="d")
    fails("NoSuchKey", s3.get_object, Bucket="alice-k", Key="f/below")
    # Directories that are objects, and those that are not.
    put("dir/", b"")
    assert s3.head_object(Bucket="alice-k", Key="dir/")["ContentLength"] == 0
    fails(404, s3.head_object, Bucket="alice-k", Key="d/")
    fails("InvalidArgument", put, "dir/", b"content")
    put("dir/in")
    s3.delete_object(Bucket="alice-k", Key="dir/in")
    assert s3.get_object(Bucket="alice-k", Key="dir/")["Body"].read() == b""
    s3.delete_object(Bucket="alice-k", Key="dir/")
    fails(404, s3.head_object, Bucket="alice-k", Key="dir/")
    # Directories that were made for a key go with the last key in them.
    put("p/q/r/s")
    s3.delete_object(Bucket="alice-k", Key="p/q/r/s")
    put("p")


def remote_keys():
    """At a provider a key is no path: whatever is text can be one, and no two are confused."""
    s3 = client()
    s3.create_bucket(Bucket="alice-k")
    good = ["a b+c", "ü/ö/ß", "%2F", "a&b=c", "\u3042", "back\\slash", "quote'\"<>", "x" * 255, "y" * 256, "...", ".hidden",
            "line\tbreak", "a//b", "a/b", "/a", "a", "a/", "a//", "//", "a/../b", "./a", ".lamassu-put-1", "lamassu.bucket",
            "f", "f/below", "d/below", "d"]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: s3.put_object(Bucket="alice-k", Key=key, Body=key.encode()), good))
    for key in good:
        assert s3.get_object(Bucket="alice-k", Key=key)["Body"].read() == key.encode(), key
    listed = [item["Key"] for item in s3.list_objects_v2(Bucket="alice-k")["Contents"]]
    assert listed == sorted(good, key=lambda key: key.encode()), listed
    fails("KeyTooLongError", s3.put_object, Bucket="alice-k", Key="z/" * 100, Body=b"")
    fails("BucketNotEmpty", s3.delete_bucket, Bucket="alice-k")
    gone = s3.delete_objects(Bucket="alice-k", Delete={"Objects": [{"Key": key} for key in good]})
    assert len(gone["Deleted"]) == len(good)
    assert "Contents" not in s3.list_objects_v2(Bucket="alice-k")
    s3.delete_bucket(Bucket="alice-k")
    fails("NoSuchBucket", s3.list_objects_v2, Bucket="alice-k")


def lists_briefly():
    """The same where each request takes its time."""
    lists(["", "a-b/", "b/c", "many/01", "photos/", "zz"], ["", "/", "0"], [2, 1000])


def lists(prefixes=["", "a", "a-", "a-b/", "b/", "b/c", "b/c/1", "many/", "many/01", "n", "photos/", "z", "zz"],
          delimiters=["", "/", "-", "0"], sizes=[1, 2, 7, 1000]):
    s3 = client()
    s3.create_bucket(Bucket="alice-l")
    names = ["a", "a-b/1", "a-b/2", "a.txt", "b/c/1", "b/c/2", "b/d", "b0", "c", "photos/2025/1", "photos/2026/1", "z"]
    names += [f"many/{n:04}" for n in range(300)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: s3.put_object(Bucket="alice-l", Key=key, Body=key.encode()), names))
    names.sort()

    def model(prefix, delimiter, after=""):
        out = []
        for key in names:
            if not key.startswith(prefix):
                continue
            at = key.find(delimiter, len(prefix)) if delimiter else -1
            group = key[:at + len(delimiter)] if at >= 0 else None
            item = ("group", group) if group else ("key", key)
            if item not in out and key > after:
                out.append(item)
        return out

    def pages(version, size, **query):
        out, token = [], {}
        while True:
            page = version(Bucket="alice-l", MaxKeys=size, **query, **token)
            items = [("key", item["Key"]) for item in page.get("Contents", [])]
            items += [("group", item["Prefix"]) for item in page.get("CommonPrefixes", [])]
            assert len(items) <= size
            out += sorted(items, key=lambda item: item[1])
            if not page["IsTruncated"]:
                return out
            if version == s3.list_objects_v2:
                token = {"ContinuationToken": page["NextContinuationToken"]}
            elif version == s3.list_objects:
                token = {"Marker": page.get("NextMarker") or items[-1][1]}
            else:
                token = {"KeyMarker": page["NextKeyMarker"]}

    def versions(**query):
        page = s3.list_object_versions(**query)
        assert all(item["VersionId"] == "null" for item in page.get("Versions", []))
        return {**page, "Contents": page.get("Versions", [])}

    for prefix in prefixes:
        for delimiter in delimiters:
            query = {"Prefix": prefix, **({"Delimiter": delimiter} if delimiter else {})}
            expected = model(prefix, delimiter)
            for version in [s3.list_objects_v2, s3.list_objects, versions]:
                for size in sizes if len(expected) < 50 else [100, 1000]:
                    found = pages(version, size, **query)
                    assert found == expected, (version, size, query, found, expected)
    for after in ["", "a", "a-b/1", "b/", "b/c/1", "b/zzz", "c", "many/0298", "zz"]:
        found = pages(s3.list_objects_v2, 1000, StartAfter=after)
        assert found == model("", "", after), after
    page = s3.list_objects_v2(Bucket="alice-l", MaxKeys=0)
    assert page["KeyCount"] == 0 and not page["IsTruncated"]
    item = s3.list_objects_v2(Bucket="alice-l", Prefix="photos/2026")["Contents"][0]
    assert item["Size"] == 13 and item["ETag"] == f'"{hashlib.md5(b"photos/2026/1").hexdigest()}"'
    fails("NoSuchBucket", s3.list_objects_v2, Bucket="alice-none")
    fails("InvalidArgument", s3.list_objects_v2, Bucket="alice-l", ContinuationToken="garbage")


def markers():
    """Pages of a directory that is an object itself, and so a key that ends with the delimiter."""
    s3 = client()
    s3.create_bucket(Bucket="alice-p")
    for name in ["photos/", "photos/1", "photos/2", "photos/sub/", "photos/sub/3", "photos/t"]:
        s3.put_object(Bucket="alice-p", Key=name, Body=b"")
    wanted = ["photos/", "photos/1", "photos/2", "photos/sub/", "photos/t"]
    of = dict(Bucket="alice-p", Prefix="photos/", Delimiter="/", MaxKeys=1)
    for call, marker, next_marker, items in [(s3.list_objects, "Marker", "NextMarker", "Contents"),
                                             (s3.list_object_versions, "KeyMarker", "NextKeyMarker", "Versions"),
                                             (s3.list_objects_v2, "ContinuationToken", "NextContinuationToken", "Contents")]:
        found, more = [], {}
        while len(found) < 9:
            page = call(**of, **more)
            found += [item["Key"] for item in page.get(items, [])]
            found += [group["Prefix"] for group in page.get("CommonPrefixes", [])]
            if not page["IsTruncated"]:
                break
            more = {marker: page[next_marker]}
        assert found == wanted, (call, found)


def directories():
    """A directory becomes an object while the last object in it is removed: it stays."""
    s3 = client(max_pool_connections=8)
    s3.create_bucket(Bucket="alice-dirs")
    with ThreadPoolExecutor(4) as pool:
        for n in range(100):
            for m in range(3):
                s3.put_object(Bucket="alice-dirs", Key=f"d{n}/{m}", Body=b"x")
            removals = [pool.submit(s3.delete_object, Bucket="alice-dirs", Key=f"d{n}/{m}") for m in range(3)]
            s3.put_object(Bucket="alice-dirs", Key=f"d{n}/", Body=b"")
            for removal in removals:
                removal.result()
            s3.head_object(Bucket="alice-dirs", Key=f"d{n}/")
            s3.delete_object(Bucket="alice-dirs", Key=f"d{n}/")
    s3.delete_bucket(Bucket="alice-dirs")


def copies():
    s3 = client()
    for bucket in ["alice-c", "alice-d"]:
        s3.create_bucket(Bucket=bucket)
    body = noise(3000001)
    s3.put_object(Bucket="alice-c", Key="from", Body=body, Metadata={"a": "1"}, ContentType="text/a", Tagging="t=1")
    source = {"Bucket": "alice-c", "Key": "from"}
    tag = s3.head_object(**source)["ETag"]
    for bucket, key in [("alice-c", "to"), ("alice-c", "dir/to"), ("alice-d", "to")]:
        copied = s3.copy_object(Bucket=bucket, Key=key, CopySource=source)
        assert copied["CopyObjectResult"]["ETag"] == tag
        got = s3.get_object(Bucket=bucket, Key=key)
        assert got["Body"].read() == body and got["Metadata"] == {"a": "1"} and got["ContentType"] == "text/a"
        assert got["TagCount"] == 1
    s3.copy_object(Bucket="alice-c", Key="new", CopySource=source, MetadataDirective="REPLACE", Metadata={"b": "2"},
                   TaggingDirective="REPLACE", Tagging="u=2")
    head = s3.head_object(Bucket="alice-c", Key="new")
    assert head["Metadata"] == {"b": "2"} and head["ContentType"] == "binary/octet-stream"
    assert s3.get_object_tagging(Bucket="alice-c", Key="new")["TagSet"] == [{"Key": "u", "Value": "2"}]
    fails("InvalidRequest", s3.copy_object, **source, CopySource=source)
    s3.copy_object(**source, CopySource=source, MetadataDirective="REPLACE", Metadata={"c": "3"})
    got = s3.get_object(**source)
    assert got["Metadata"] == {"c": "3"} and got["Body"].read() == body
    fails("NoSuchKey", s3.copy_object, Bucket="alice-c", Key="x", CopySource="alice-c/none")
    fails(412, s3.copy_object, Bucket="alice-c", Key="x", CopySource=source, CopySourceIfNoneMatch=tag)
    fails(412, s3.copy_object, Bucket="alice-c", Key="x", CopySource=source, CopySourceIfMatch='"y"')
    # Conditional writes, by many at once: one wins.
    def write(n):
        try:
            return put_if(s3, "alice-c", "once", str(n).encode(), "If-None-Match", "*") == 200
        except ClientError:
            return False
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(write, range(16))) == 1
    first = s3.get_object(Bucket="alice-c", Key="once")
    content, tag = first["Body"].read(), first["ETag"]
    assert put_if(s3, "alice-c", "once", b"wrong", "If-Match", '"other"') == 412
    assert s3.get_object(Bucket="alice-c", Key="once")["Body"].read() == content
    assert put_if(s3, "alice-c", "once", b"next", "If-Match", tag) == 200
    assert put_if(s3, "alice-c", "none", b"next", "If-Match", tag) == 404
    assert put_if(s3, "alice-c", "none", b"first", "If-None-Match", tag) == 200
    # A copy to its own place never puts an older content back.
    for n in range(20):
        own = {"Bucket": "alice-c", "Key": f"own/{n}"}
        s3.put_object(**own, Body=body)
        again = lambda: s3.copy_object(**own, CopySource=own, MetadataDirective="REPLACE", Metadata={"n": "1"})
        with ThreadPoolExecutor(2) as pool:
            copied = pool.submit(again)
            s3.put_object(**own, Body=b"newer")
            copied.result()
        assert s3.get_object(**own)["Body"].read() == b"newer", n


def put_if(s3, bucket, key, body, header, value):
    """This boto3 knows no conditional writes: the header is added before the request is signed."""
    def add(request, **_):
        request.headers[header] = value
    own = client()
    own.meta.events.register("before-sign.s3.PutObject", add)
    try:
        return own.put_object(Bucket=bucket, Key=key, Body=body)["ResponseMetadata"]["HTTPStatusCode"]
    except ClientError as error:
        return error.response["ResponseMetadata"]["HTTPStatusCode"]


def checksums():
    s3 = client()
    s3.create_bucket(Bucket="alice-s")
    body = noise(2500000)
    b64 = lambda digest: base64.b64encode(digest).decode()
    sums = {"SHA256": b64(hashlib.sha256(body).digest()), "SHA1": b64(hashlib.sha1(body).digest()),
            "CRC32": b64(zlib.crc32(body).to_bytes(4, "big"))}
    for name, value in sums.items():
        put = s3.put_object(Bucket="alice-s", Key=name, Body=body, ChecksumAlgorithm=name)
        assert put[f"Checksum{name}"] == value
        got = s3.get_object(Bucket="alice-s", Key=name, ChecksumMode="ENABLED")
        assert got[f"Checksum{name}"] == value and got["Body"].read() == body
        assert f"Checksum{name}" not in s3.head_object(Bucket="alice-s", Key=name)
        wrong = b64(b"\0" * (32 if name == "SHA256" else 20 if name == "SHA1" else 4))
        fails("BadDigest", s3.put_object, Bucket="alice-s", Key="wrong", Body=body, **{f"Checksum{name}": wrong})
    fails("BadDigest", s3.put_object, Bucket="alice-s", Key="wrong", Body=body, ContentMD5=b64(hashlib.md5(b"").digest()))
    fails(404, s3.head_object, Bucket="alice-s", Key="wrong")
    unknown = client()
    unknown.meta.events.register("before-sign.s3.PutObject", lambda request, **_: request.headers.add_header("x-amz-checksum-md5", "AAAA"))
    fails("InvalidRequest", unknown.put_object, Bucket="alice-s", Key="wrong", Body=body)
    # A stream with its checksum behind it, unsigned.
    import io
    stream = client(parameter_validation=True)
    put = stream.put_object(Bucket="alice-s", Key="stream", Body=io.BytesIO(body), ChecksumAlgorithm="SHA256")
    assert put["ChecksumSHA256"] == sums["SHA256"]
    # In parts.
    key = {"Bucket": "alice-s", "Key": "parts"}
    upload = s3.create_multipart_upload(**key, ChecksumAlgorithm="SHA256")["UploadId"]
    pieces = [noise(5 << 20, b"p"), b"end"]
    parts = []
    for n, piece in enumerate(pieces, 1):
        put = s3.upload_part(**key, UploadId=upload, PartNumber=n, Body=piece, ChecksumAlgorithm="SHA256")
        parts.append({"PartNumber": n, "ETag": put["ETag"], "ChecksumSHA256": put["ChecksumSHA256"]})
    # What is said of the object or the document is compared, or refused if it cannot be.
    fails("InvalidRequest", s3.complete_multipart_upload, **key, UploadId=upload, MultipartUpload={"Parts": parts},
          ChecksumCRC32="AAAAAA==")
    wrong = client()
    wrong.meta.events.register("before-sign.s3.CompleteMultipartUpload",
                               lambda request, **_: request.headers.add_header("Content-MD5", "AAAAAAAAAAAAAAAAAAAAAA=="))
    fails("BadDigest", wrong.complete_multipart_upload, **key, UploadId=upload, MultipartUpload={"Parts": parts})
    done = s3.complete_multipart_upload(**key, UploadId=upload, MultipartUpload={"Parts": parts})
    whole = hashlib.sha256(b"".join(hashlib.sha256(piece).digest() for piece in pieces)).digest()
    assert done["ChecksumSHA256"] == b64(whole) + "-2"
    asked = s3.get_object_attributes(**key, ObjectAttributes=["Checksum", "ObjectSize", "ObjectParts", "ETag"])
    assert asked["Checksum"]["ChecksumSHA256"] == done["ChecksumSHA256"] and asked["ObjectSize"] == (5 << 20) + 3
    assert asked["ObjectParts"]["TotalPartsCount"] == 2


def crt_checksums():
    """Those for which boto3 takes awscrt, whose own sums are what the gateway's are compared with."""
    from awscrt import checksums
    s3 = client()
    s3.create_bucket(Bucket="alice-crt")
    body = noise(2500000)
    pieces = [noise(5 << 20, b"p"), b"end"]
    for name, sum_of, length in [("CRC32C", checksums.crc32c, 4), ("CRC64NVME", checksums.crc64nvme, 8)]:
        b64 = lambda data: base64.b64encode(sum_of(data).to_bytes(length, "big")).decode()
        field = f"Checksum{name}"
        sent = []
        s3.meta.events.register("before-send.s3", lambda request, **_: sent.append(request.headers))
        put = s3.put_object(Bucket="alice-crt", Key=name, Body=body, ChecksumAlgorithm=name)
        headers = {key.lower() for key in sent[-1]}
        assert {f"x-amz-checksum-{name.lower()}", "x-amz-trailer"} & headers, headers
        assert put[field] == b64(body)
        got = s3.get_object(Bucket="alice-crt", Key=name, ChecksumMode="ENABLED")
        assert got[field] == b64(body) and got["Body"].read() == body
        wrong = base64.b64encode(bytes(length)).decode()
        fails("BadDigest", s3.put_object, Bucket="alice-crt", Key="wrong", Body=body, **{field: wrong})
        fails(404, s3.head_object, Bucket="alice-crt", Key="wrong")
        # Of the whole object, and of the parts.
        for kind in ["FULL_OBJECT"] + ["COMPOSITE"] * (name == "CRC32C"):
            key = {"Bucket": "alice-crt", "Key": f"{name}-{kind}"}
            upload = s3.create_multipart_upload(**key, ChecksumAlgorithm=name, ChecksumType=kind)["UploadId"]
            parts = []
            for n, piece in enumerate(pieces, 1):
                put = s3.upload_part(**key, UploadId=upload, PartNumber=n, Body=piece, ChecksumAlgorithm=name)
                assert put[field] == b64(piece)
                parts.append({"PartNumber": n, "ETag": put["ETag"], field: put[field]})
            done = s3.complete_multipart_upload(**key, UploadId=upload, MultipartUpload={"Parts": parts}, ChecksumType=kind)
            if kind == "FULL_OBJECT":
                assert done[field] == b64(b"".join(pieces)), done
            else:
                digests = b"".join(sum_of(piece).to_bytes(length, "big") for piece in pieces)
                assert done[field] == b64(digests) + "-2", done
            got = s3.get_object(**key, ChecksumMode="ENABLED")
            assert got["Body"].read() == b"".join(pieces)


def presigned():
    s3 = client()
    s3.create_bucket(Bucket="alice-p")
    key = {"Bucket": "alice-p", "Key": "a b/ü"}
    url = s3.generate_presigned_url("put_object", Params=key, ExpiresIn=600)
    request = urllib.request.Request(url, data=b"by a browser", method="PUT")
    assert urllib.request.urlopen(request).status == 200
    url = s3.generate_presigned_url("get_object", Params=key, ExpiresIn=600)
    assert urllib.request.urlopen(url).read() == b"by a browser"

    def refused(url, method="GET", headers={}):
        try:
            urllib.request.urlopen(urllib.request.Request(url, method=method, headers=headers))
        except urllib.error.HTTPError as error:
            return error.code
        raise AssertionError(f"{url} was answered")

    assert refused(url, "DELETE") == 403
    assert refused(url.replace("a%20b", "a%20c")) == 403
    assert refused(url, headers={"x-amz-copy-source": "/alice-p/x"}) == 403
    assert refused(url.split("?")[0]) == 403
    assert refused(url.split("&X-Amz-Signature")[0]) in (400, 403)
    import time
    short = s3.generate_presigned_url("get_object", Params=key, ExpiresIn=1)
    time.sleep(2.5)
    assert refused(short) == 403
    try:
        urllib.request.urlopen(short)
    except urllib.error.HTTPError as error:
        said = error.read()
    assert b"<Code>AccessDenied</Code>" in said and b"Request has expired" in said, said
    assert refused(s3.generate_presigned_url("get_object", Params=key, ExpiresIn=604801)) == 400


def tenants():
    alice, bob, reader = client(), client("BOB", "bob-secret-bob-secret"), client("READER", "reader-secret-reader")
    alice.create_bucket(Bucket="alice-t")
    bob.create_bucket(Bucket="bob-t")
    alice.put_object(Bucket="alice-t", Key="k", Body=b"alice's")
    bob.put_object(Bucket="bob-t", Key="k", Body=b"bob's")
    fails("AccessDenied", bob.get_object, Bucket="alice-t", Key="k")
    fails("AccessDenied", bob.put_object, Bucket="alice-t", Key="k", Body=b"")
    fails("AccessDenied", bob.list_objects_v2, Bucket="alice-t")
    # The same of a bucket that is not there.
    fails("AccessDenied", bob.list_objects_v2, Bucket="alice-none")
    fails("AccessDenied", bob.create_bucket, Bucket="alice-u")
    fails("AccessDenied", bob.delete_objects, Bucket="alice-t", Delete={"Objects": [{"Key": "k"}]})
    fails("AccessDenied", bob.copy_object, Bucket="bob-t", Key="stolen", CopySource="alice-t/k")
    upload = bob.create_multipart_upload(Bucket="bob-t", Key="stolen")["UploadId"]
    fails("AccessDenied", bob.upload_part_copy, Bucket="bob-t", Key="stolen", UploadId=upload, PartNumber=1,
          CopySource="alice-t/k")
    fails("AccessDenied", bob.abort_multipart_upload, Bucket="alice-t", Key="stolen", UploadId=upload)
    bob.abort_multipart_upload(Bucket="bob-t", Key="stolen", UploadId=upload)
    assert [bucket["Name"] for bucket in bob.list_buckets()["Buckets"]] == ["bob-t"]
    assert reader.get_object(Bucket="alice-t", Key="k")["Body"].read() == b"alice's"
    fails("AccessDenied", reader.put_object, Bucket="alice-t", Key="k", Body=b"")
    fails("AccessDenied", reader.delete_object, Bucket="alice-t", Key="k")
    fails("SignatureDoesNotMatch", client("ALICE", "wrong-secret").list_buckets)
    fails("InvalidAccessKeyId", client("NOBODY", "wrong-secret").list_buckets)
    assert alice.get_object(Bucket="alice-t", Key="k")["Body"].read() == b"alice's"


def unsupported():
    s3 = client()
    s3.create_bucket(Bucket="alice-u")
    put = lambda **more: s3.put_object(Bucket="alice-u", Key="k", Body=b"x", **more)
    assert "Status" not in s3.get_bucket_versioning(Bucket="alice-u")
    fails("NotImplemented", s3.put_bucket_versioning, Bucket="alice-u", VersioningConfiguration={"Status": "Enabled"})
    fails("NotImplemented", put, ACL="public-read")
    fails("NotImplemented", put, SSECustomerAlgorithm="AES256", SSECustomerKey="0" * 32)
    fails("NotImplemented", put, ServerSideEncryption="aws:kms")
    fails("NotImplemented", put, ObjectLockMode="COMPLIANCE", ObjectLockRetainUntilDate="2030-01-01")
    fails("InvalidStorageClass", put, StorageClass="GLACIER")
    fails(404, s3.head_object, Bucket="alice-u", Key="k")
    put(ACL="private", ServerSideEncryption="AES256")
    fails("NoSuchVersion", s3.get_object, Bucket="alice-u", Key="k", VersionId="abc")
    assert s3.get_object(Bucket="alice-u", Key="k", VersionId="null")["Body"].read() == b"x"
    fails("NoSuchBucketPolicy", s3.get_bucket_policy, Bucket="alice-u")
    fails("NoSuchLifecycleConfiguration", s3.get_bucket_lifecycle_configuration, Bucket="alice-u")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
