"""What a gateway promises of objects in parts, checked by boto3. `parts.py NAME` runs one of the functions below."""

import base64
import hashlib
import http.client
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from botocore.exceptions import ClientError

from boto import URL, client, fails, noise


def multipart():
    s3 = client()
    s3.create_bucket(Bucket="alice-m")
    big, part = noise(13 << 20), 5 << 20
    key = {"Bucket": "alice-m", "Key": "dir/big"}
    upload = s3.create_multipart_upload(**key, ContentType="text/x", Metadata={"a": "b"})["UploadId"]
    up = {**key, "UploadId": upload}
    cut = lambda n: big[(n - 1) * part:n * part]
    # In any order, in parallel, one of them twice.
    s3.upload_part(**up, PartNumber=2, Body=noise(part, b"other"))
    with ThreadPoolExecutor(3) as pool:
        tags = dict(pool.map(lambda n: (n, s3.upload_part(**up, PartNumber=n, Body=cut(n))["ETag"]), [3, 1, 2]))
    fails(404, s3.head_object, **key)
    listed = s3.list_parts(**up, MaxParts=2)
    assert [p["PartNumber"] for p in listed["Parts"]] == [1, 2] and listed["IsTruncated"]
    listed = s3.list_parts(**up, PartNumberMarker=listed["NextPartNumberMarker"])
    assert [(p["PartNumber"], p["Size"]) for p in listed["Parts"]] == [(3, 3 << 20)]
    uploads = s3.list_multipart_uploads(Bucket="alice-m")["Uploads"]
    assert [(u["Key"], u["UploadId"]) for u in uploads] == [("dir/big", upload)]
    assert "Contents" not in s3.list_objects_v2(Bucket="alice-m")
    parts = [{"PartNumber": n, "ETag": tags[n]} for n in (1, 2, 3)]
    complete = lambda parts, **more: s3.complete_multipart_upload(**up, MultipartUpload={"Parts": parts}, **more)
    fails("InvalidPartOrder", complete, parts[::-1])
    fails("InvalidPart", complete, [{"PartNumber": 9, "ETag": tags[1]}])
    fails("InvalidPart", complete, [{"PartNumber": 1, "ETag": tags[2]}])
    fails("EntityTooSmall", complete, [parts[2 - 2], {"PartNumber": 3, "ETag": tags[3]}, {"PartNumber": 4, "ETag": s3.upload_part(
        **up, PartNumber=4, Body=b"last")["ETag"]}])
    done = complete(parts)
    digest = hashlib.md5(b"".join(hashlib.md5(cut(n)).digest() for n in (1, 2, 3))).hexdigest()
    assert done["ETag"] == f'"{digest}-3"'
    got = s3.get_object(**key)
    assert got["Body"].read() == big and got["ContentType"] == "text/x" and got["Metadata"] == {"a": "b"}
    got = s3.get_object(**key, PartNumber=3)
    assert got["Body"].read() == cut(3) and got["PartsCount"] == 3
    fails(416, s3.get_object, **key, PartNumber=4)
    # Once more, as by a client that has lost the answer.
    assert complete(parts)["ETag"] == done["ETag"]
    fails("NoSuchUpload", complete, parts[:2])
    fails("NoSuchUpload", s3.upload_part, **up, PartNumber=1, Body=b"")
    # Aborted: nothing is left.
    upload = s3.create_multipart_upload(Bucket="alice-m", Key="gone/x")["UploadId"]
    up = {"Bucket": "alice-m", "Key": "gone/x", "UploadId": upload}
    s3.upload_part(**up, PartNumber=1, Body=b"x")
    fails("NoSuchUpload", s3.upload_part, **{**up, "Key": "gone/y"}, PartNumber=1, Body=b"x")
    s3.abort_multipart_upload(**up)
    fails("NoSuchUpload", s3.abort_multipart_upload, **up)
    assert "Uploads" not in s3.list_multipart_uploads(Bucket="alice-m")
    # A part of a range of another object.
    upload = s3.create_multipart_upload(Bucket="alice-m", Key="made")["UploadId"]
    up = {"Bucket": "alice-m", "Key": "made", "UploadId": upload}
    copied = s3.upload_part_copy(**up, PartNumber=1, CopySource="alice-m/dir/big", CopySourceRange=f"bytes=4096-{part + 4095}")
    tag = copied["CopyPartResult"]["ETag"]
    assert tag == f'"{hashlib.md5(big[4096:part + 4096]).hexdigest()}"'
    fails("InvalidRange", s3.upload_part_copy, **up, PartNumber=2, CopySource="alice-m/dir/big", CopySourceRange=f"bytes=0-{13 << 20}")
    last = s3.upload_part(**up, PartNumber=2, Body=b"tail")["ETag"]
    s3.complete_multipart_upload(**up, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": tag}, {"PartNumber": 2, "ETag": last}]})
    assert s3.get_object(Bucket="alice-m", Key="made")["Body"].read() == big[4096:part + 4096] + b"tail"
    # Objects hold a bucket, uploads do not.
    s3.create_multipart_upload(Bucket="alice-m", Key="dir/never/done")
    fails("BucketNotEmpty", s3.delete_bucket, Bucket="alice-m")
    for name in ["made", "dir/big"]:
        s3.delete_object(Bucket="alice-m", Key=name)
    s3.delete_bucket(Bucket="alice-m")
    fails(404, s3.head_bucket, Bucket="alice-m")
    one_of_two_ends(s3)
    all_completions(s3)
    uneven_parts(s3)


def all_completions(s3):
    """A completion by several requests at once: all have the same answer."""
    s3.create_bucket(Bucket="alice-all")
    bodies = [noise(5 << 20), noise(5 << 20, b"o"), b"end"]
    with ThreadPoolExecutor(4) as pool:
        for n in range(4):
            key = {"Bucket": "alice-all", "Key": f"all/{n}"}
            up = {**key, "UploadId": s3.create_multipart_upload(**key)["UploadId"]}
            tags = [s3.upload_part(**up, PartNumber=m, Body=body)["ETag"] for m, body in enumerate(bodies, 1)]
            parts = {"Parts": [{"PartNumber": m, "ETag": tag} for m, tag in enumerate(tags, 1)]}

            def complete(wait):
                time.sleep(wait)
                return s3.complete_multipart_upload(**up, MultipartUpload=parts)["ETag"]

            ends = list(pool.map(complete, [m * n / 100 for m in range(4)]))
            assert len(set(ends)) == 1 and ends[0].endswith('-3"'), ends
            assert s3.get_object(**key)["Body"].read() == b"".join(bodies)


def uneven_parts(s3):
    """Parts of so many sizes that a list of them does not fit beside the object."""
    key = {"Bucket": "alice-all", "Key": "uneven"}
    up = {**key, "UploadId": s3.create_multipart_upload(**key, Metadata={"a": "m" * 1000})["UploadId"]}
    sizes = [(5 << 20) + n for n in range(20)]
    source = {"Bucket": "alice-all", "Key": "source"}
    s3.put_object(**source, Body=noise(sizes[-1]))
    parts = []
    for n, size in enumerate(sizes, 1):
        copied = s3.upload_part_copy(**up, PartNumber=n, CopySource=source, CopySourceRange=f"bytes=0-{size - 1}")
        parts.append({"PartNumber": n, "ETag": copied["CopyPartResult"]["ETag"]})
    tag = s3.complete_multipart_upload(**up, MultipartUpload={"Parts": parts})["ETag"]
    assert tag.endswith('-20"'), tag
    head = s3.head_object(**key)
    assert head["ContentLength"] == sum(sizes) and head["ETag"] == tag and head["Metadata"] == {"a": "m" * 1000}
    # Once more: the answer may have been lost.
    assert s3.complete_multipart_upload(**up, MultipartUpload={"Parts": parts})["ETag"] == tag


def one_of_two_ends(s3):
    """A completion and an abortion at once: one of them finds the upload, the other none."""
    s3.create_bucket(Bucket="alice-ends")

    def code(call, **given):
        try:
            call(**given)
        except ClientError as error:
            return error.response["Error"]["Code"]

    with ThreadPoolExecutor(2) as pool:
        for n in range(8):
            key = {"Bucket": "alice-ends", "Key": f"end/{n}"}
            up = {**key, "UploadId": s3.create_multipart_upload(**key)["UploadId"]}
            tag = s3.upload_part(**up, PartNumber=1, Body=b"x%d" % n)["ETag"]
            both = {"MultipartUpload": {"Parts": [{"PartNumber": 1, "ETag": tag}]}}
            calls = [(s3.complete_multipart_upload, both), (s3.abort_multipart_upload, {})]
            done = [pool.submit(code, call, **up, **given) for call, given in calls[::1 - n % 2 * 2]]
            completed, aborted = [one.result() for one in done][::1 - n % 2 * 2]
            assert {completed, aborted} == {None, "NoSuchUpload"}, (completed, aborted)
            there = code(s3.head_object, **key)
            assert there == (None if completed is None else "404"), there


def ends():
    s3 = client()

    def slow_part(key, between, whole=True):
        """Uploads a part; `between` is called in the middle of it. The status it is answered with."""
        url = s3.generate_presigned_url("upload_part", Params={**key, "PartNumber": 1})
        path = url.removeprefix(URL)
        connection = http.client.HTTPConnection(URL.removeprefix("http://"), timeout=120)
        size = 3 << 20
        connection.putrequest("PUT", path)
        connection.putheader("content-length", str(size))
        connection.endheaders(b"p" * (size // 2))
        # A part that is listed as being written is under way: another one is answered behind it.
        s3.upload_part(**key, PartNumber=2, Body=b"two")
        between()
        if not whole:
            connection.close()
            return None
        connection.send(b"p" * (size - size // 2))
        return connection.getresponse().status

    # An upload ends while a part comes: the part is refused, and nothing is left.
    for number, (name, whole) in enumerate([("dir/big", True), ("dir/big", False), ("big", True), ("big", False)]):
        bucket = f"alice-e{number}"
        s3.create_bucket(Bucket=bucket)
        key = {"Bucket": bucket, "Key": name}
        key["UploadId"] = s3.create_multipart_upload(**key)["UploadId"]
        status = slow_part(key, lambda: s3.abort_multipart_upload(**key), whole)
        assert status in (404, None), status
        fails("NoSuchUpload", s3.abort_multipart_upload, **key)
        s3.put_object(Bucket=bucket, Key="dir", Body=b"x")
        s3.delete_object(Bucket=bucket, Key="dir")
        s3.delete_bucket(Bucket=bucket)
    # The same where it is completed.
    s3.create_bucket(Bucket="alice-e")
    key = {"Bucket": "alice-e", "Key": "big"}
    up = {**key, "UploadId": s3.create_multipart_upload(**key)["UploadId"]}
    tag = s3.upload_part(**up, PartNumber=3, Body=b"three")["ETag"]
    complete = lambda: s3.complete_multipart_upload(**up, MultipartUpload={"Parts": [{"PartNumber": 3, "ETag": tag}]})
    assert slow_part(up, complete) == 404
    assert s3.get_object(**key)["Body"].read() == b"three"
    s3.delete_object(**key)
    # One that cannot begin leaves nothing either.
    tags = "&".join(f"k{n}{'x' * 100}={'v' * 250}" for n in range(10))
    for _ in range(2):
        begin = dict(Bucket="alice-e", Key="q/big", Metadata={"m": "y" * 1900}, Tagging=tags)
        try:
            begun = s3.create_multipart_upload(**begin)
        except ClientError as error:
            assert error.response["Error"]["Code"] == "MetadataTooLarge", error
        else:
            # The store keeps much with a file.
            s3.abort_multipart_upload(Bucket="alice-e", Key="q/big", UploadId=begun["UploadId"])
    s3.put_object(Bucket="alice-e", Key="q", Body=b"x")
    s3.delete_object(Bucket="alice-e", Key="q")
    s3.delete_bucket(Bucket="alice-e")


def parts_again():
    """A part is uploaded anew while the upload is completed: the object is of the parts that were named."""
    s3, other = client(), client()
    s3.create_bucket(Bucket="alice-again")
    part, begun = noise(5 << 20), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        for n in range(20):
            key = {"Bucket": "alice-again", "Key": f"k{n}"}
            up = {**key, "UploadId": s3.create_multipart_upload(**key)["UploadId"]}
            tags = [s3.upload_part(**up, PartNumber=m + 1, Body=body)["ETag"] for m, body in enumerate([part, part, b"z" * 1000])]
            parts = [{"PartNumber": m + 1, "ETag": tag} for m, tag in enumerate(tags)]

            def again():
                begun.wait()
                try:
                    for byte in b"!?#":
                        other.upload_part(**up, PartNumber=3, Body=bytes([byte]) * 1000)
                except ClientError as error:
                    assert error.response["Error"]["Code"] == "NoSuchUpload", error

            begun.clear()
            uploading = pool.submit(again)
            begun.set()
            try:
                s3.complete_multipart_upload(**up, MultipartUpload={"Parts": parts})
                assert s3.get_object(**key)["Body"].read() == part + part + b"z" * 1000, n
            except ClientError as error:
                assert error.response["Error"]["Code"] == "InvalidPart", error
            uploading.result()


def large_parts():
    """Parts whose checksums come behind them, as over TLS, and which are sent on before that; and copied ones."""
    s3 = client()
    s3.create_bucket(Bucket="alice-s")
    import botocore.httpchecksum as flexible
    key = {"Bucket": "alice-s", "Key": "large-parts"}
    b64 = lambda digest: base64.b64encode(digest).decode()
    pieces = [noise(20 << 20, b"l"), noise(17 << 20, b"m")]
    s3.put_object(Bucket="alice-s", Key="source", Body=pieces[1])
    up = {**key, "UploadId": s3.create_multipart_upload(**key, ChecksumAlgorithm="SHA256")["UploadId"]}
    resolve, announced = flexible.resolve_request_checksum_algorithm, []

    def behind(request, *args, **kwargs):
        resolve(request, *args, **kwargs)
        request["context"]["checksum"]["request_algorithm"]["in"] = "trailer"

    flexible.resolve_request_checksum_algorithm = behind
    own = client()
    tell = lambda request, **_: announced.append(request.headers.get("x-amz-trailer"))
    own.meta.events.register("before-send.s3.UploadPart", tell)
    try:
        first = own.upload_part(**up, PartNumber=1, Body=pieces[0], ChecksumAlgorithm="SHA256")
    finally:
        flexible.resolve_request_checksum_algorithm = resolve
    assert [str(value) for value in announced] in (["x-amz-checksum-sha256"], ["b'x-amz-checksum-sha256'"]), announced
    second = s3.upload_part_copy(**up, PartNumber=2, CopySource="alice-s/source")["CopyPartResult"]
    digests = [hashlib.sha256(piece).digest() for piece in pieces]
    tags = [f'"{hashlib.md5(piece).hexdigest()}"' for piece in pieces]
    told = [(part["ETag"], part["ChecksumSHA256"]) for part in [first, second]]
    assert told == [(tag, b64(digest)) for tag, digest in zip(tags, digests)], told
    listed = [(part["ETag"], part["ChecksumSHA256"]) for part in s3.list_parts(**up)["Parts"]]
    assert listed == told, listed
    parts = {"Parts": [{"PartNumber": n, "ETag": tag, "ChecksumSHA256": digest} for n, (tag, digest) in enumerate(told, 1)]}
    done = s3.complete_multipart_upload(**up, MultipartUpload=parts)
    assert done["ChecksumSHA256"] == b64(hashlib.sha256(b"".join(digests)).digest()) + "-2", done
    assert s3.get_object(**key)["Body"].read() == b"".join(pieces)
    # The answer may have been lost.
    assert s3.complete_multipart_upload(**up, MultipartUpload=parts)["ETag"] == done["ETag"]


globals()[sys.argv[1]]()
