"""PyKMIP for tests: its server on a free port, and what an administrator would do there.

    pykmip.py serve DIR [PORT]      prints the port; ends, with all its processes, when standard input does
    pykmip.py do DIR PORT OP ARG… [+ OP ARG…]…
        create NAME BITS | secret NAME | activate ID | revoke ID | compromise ID | destroy ID; `_` is the ID that was made last

DIR holds ca.pem, server.pem and client.pem (certificate and key each); the server keeps its database and its log there.
"""
import os
import signal
import ssl
import sys
import threading

if not hasattr(ssl, "wrap_socket"):  # gone since Python 3.12; PyKMIP 0.10 still calls it

    def wrap_socket(sock, keyfile, certfile, server_side, cert_reqs, ssl_version, ca_certs, ciphers=None, **rest):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = cert_reqs
        context.load_cert_chain(certfile, keyfile)
        context.load_verify_locations(ca_certs)
        if ciphers:
            context.set_ciphers(ciphers)
        return context.wrap_socket(sock, server_side=server_side, **rest)

    ssl.wrap_socket = wrap_socket


def serve(here, port=0):
    from kmip.services.server.server import KmipServer

    os.makedirs(f"{here}/policy", exist_ok=True)
    server = KmipServer(
        hostname="127.0.0.1",
        certificate_path=f"{here}/server.pem",
        key_path=f"{here}/server.pem",
        ca_path=f"{here}/ca.pem",
        auth_suite="TLS1.2",
        config_path=None,
        log_path=f"{here}/server.log",
        policy_path=f"{here}/policy",
        enable_tls_client_auth=True,
        logging_level="INFO",
        database_path=f"{here}/kmip.db",
    )
    server.config.settings["port"] = port  # 0, any that is free, is none to the constructor
    with server:
        server._socket.listen(5)
        print(server._socket.getsockname()[1], flush=True)

        def end_with_the_test():
            sys.stdin.read()
            os.killpg(0, signal.SIGKILL)

        threading.Thread(target=end_with_the_test, daemon=True).start()
        server.serve()


def do(here, port, *words):
    from kmip.core import enums
    from kmip.pie.client import ProxyKmipClient
    from kmip.pie.objects import SecretData

    masks = [enums.CryptographicUsageMask.ENCRYPT, enums.CryptographicUsageMask.DECRYPT]
    client = ProxyKmipClient(
        hostname="127.0.0.1",
        port=port,
        cert=f"{here}/client.pem",
        key=f"{here}/client.pem",
        ca=f"{here}/ca.pem",
        ssl_version="PROTOCOL_TLSv1_2",
        config_file=os.devnull,
    )
    operations = {
        "create": lambda name, bits: client.create(
            enums.CryptographicAlgorithm.AES, int(bits), name=name, cryptographic_usage_mask=masks
        ),
        "secret": lambda name: client.register(SecretData(b"\7" * 32, enums.SecretDataType.PASSWORD, name=name)),
        "activate": client.activate,
        "revoke": lambda uid: client.revoke(enums.RevocationReasonCode.CESSATION_OF_OPERATION, uid),
        "compromise": lambda uid: client.revoke(enums.RevocationReasonCode.KEY_COMPROMISE, uid),
        "destroy": client.destroy,
    }
    last = None
    with client:
        while words:
            end = words.index("+") if "+" in words else len(words)
            (op, *args), words = words[:end], words[end + 1 :]
            uid = operations[op](*(last if arg == "_" else arg for arg in args))
            if uid:
                last = uid
                print(uid)


if __name__ == "__main__":
    {"serve": serve, "do": do}[sys.argv[1]](*(int(a) if i == 1 else a for i, a in enumerate(sys.argv[2:])))
