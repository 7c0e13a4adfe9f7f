//! A tenant's gateway in front of a provider's access proxy: objects are sealed by the gateway, and stored with a
//! credential of the tenant's policy manager.

use crate::boto;
use crate::lab::{Lab, run, until};
use crate::provider::{PATIENT, Provider};
use std::fs;

/// What the gateway, a person to the policy manager, may do: everything below one folder.
const RULE: &str = "permit(principal == User::\"gateway\", action, resource in Stored::\"objects\");\n";

/// A gateway that is not started yet, and its provider with a rule for it.
fn chain(life: &str) -> (Provider, Lab) {
    let provider = Provider::new(PATIENT);
    let rule = provider.path("tenants/gateway.cedar");
    fs::write(&rule, RULE).expect("writes");
    let manager = provider.manager("acme");
    run(provider.policy("acme", &["person", "set"]).arg(&manager).arg("gateway"));
    run(provider.policy("acme", &["rule", "set"]).arg(&manager).arg("gateway").arg(rule));
    provider.publish("acme");
    let lab = Lab::without_gateway("");
    lab.configure(&format!(
        "backend = \"s3://acme/objects\"\n[provider]\nendpoint = \"http://127.0.0.1:{}\"\n\
         credentials = \"provider.toml\"\nretries = 1\n",
        provider.port
    ));
    // The proxy reads publications every second. With the rules from before, it takes no credential for the new ones.
    let own = provider.issue("acme", "gateway", &[]);
    provider.python(
        &own,
        "for _ in range(1200):\n    \
             code = code_of(s3.list_objects_v2, Bucket='acme', Prefix='objects/')[0]\n    \
             if code == 'ok': break\n    time.sleep(0.1)\nassert code == 'ok', code\n",
    );
    renew(&provider, &lab, life);
    (provider, lab)
}

/// Another credential for the gateway.
fn renew(provider: &Provider, lab: &Lab, life: &str) {
    let mut issue = provider.policy("acme", &["issue", "--toml", "--seconds", life]);
    lab.write("provider.toml", &run(issue.arg(provider.manager("acme")).arg("gateway")));
}

#[test]
fn objects_are_sealed_and_stored_by_rules() {
    if !boto::is_there() {
        return;
    }
    let (provider, mut lab) = chain("3600");
    lab.start();
    for name in ["objects", "parts::multipart", "copies", "markers", "checksums"] {
        boto::check(&lab, name);
    }
    lab.python(
        "s3.create_bucket(Bucket='alice-chain')\n\
         s3.put_object(Bucket='alice-chain', Key='reports/plan', Body=b'the plan for the third quarter ' * 100000,\n    \
             Metadata={'author': 'somebody-of-law'})\n\
         assert s3.head_object(Bucket='alice-chain', Key='reports/plan')['Metadata']['author'] == 'somebody-of-law'\n\
         found = s3.list_objects_v2(Bucket='alice-chain', Delimiter='/')\n\
         assert [one['Prefix'] for one in found['CommonPrefixes']] == ['reports/'], found",
    );
    for plain in ["alice-chain", "reports", "third quarter", "somebody-of-law"] {
        assert_eq!(provider.found(plain), Vec::<std::path::PathBuf>::new(), "{plain}");
    }
    assert!(!provider.log().contains("panick") && !lab.log().contains("panick"));
}

/// A provider's directory cannot have both `a` and `a/b`. Whichever comes second is refused by name, and nothing of it
/// is stored.
#[test]
fn a_key_below_another_is_refused() {
    if !boto::is_there() {
        return;
    }
    let (_provider, mut lab) = chain("3600");
    lab.start();
    lab.python(
        "from botocore.exceptions import ClientError\n\
         from boto3.s3.transfer import TransferConfig\n\
         import io\n\
         B = 'alice-below'\ns3.create_bucket(Bucket=B)\n\
         def refused(call, **more):\n    \
             try: call(Bucket=B, **more)\n    \
             except ClientError as error:\n        \
                 said = error.response\n        \
                 assert said['Error']['Code'] == 'KeyIsDirectory', said\n        \
                 assert said['ResponseMetadata']['HTTPStatusCode'] == 409, said\n    \
             else: assert False, more\n\
         s3.put_object(Bucket=B, Key='a', Body=b'1')\n\
         s3.put_object(Bucket=B, Key='c/d', Body=b'2')\n\
         refused(s3.put_object, Key='a/b', Body=b'x')\n\
         refused(s3.put_object, Key='c', Body=b'x')\n\
         refused(s3.put_object, Key='a/b', Body=bytes(20 << 20))\n\
         refused(s3.put_object, Key='c', Body=bytes(20 << 20))\n\
         for call, more in [(s3.put_object, {'Body': b'x'}), (s3.get_object, {}), (s3.delete_object, {})]:\n    \
             try: call(Bucket=B, Key='l' * 176, **more)\n    \
             except ClientError as error: assert error.response['Error']['Code'] == 'KeyTooLongError', error\n    \
             else: assert False, call\n\
         s3.put_object(Bucket=B, Key='l' * 175, Body=b'x')\n\
         s3.delete_object(Bucket=B, Key='l' * 175)\n\
         refused(s3.copy_object, Key='c', CopySource=f'{B}/a')\n\
         refused(s3.copy_object, Key='a/b', CopySource=f'{B}/c/d')\n\
         up = s3.create_multipart_upload(Bucket=B, Key='c')['UploadId']\n\
         part = s3.upload_part(Bucket=B, Key='c', UploadId=up, PartNumber=1, Body=b'x')['ETag']\n\
         refused(s3.complete_multipart_upload, Key='c', UploadId=up,\n    \
             MultipartUpload={'Parts': [{'PartNumber': 1, 'ETag': part}]})\n\
         s3.abort_multipart_upload(Bucket=B, Key='c', UploadId=up)\n\
         keys = [one['Key'] for one in s3.list_objects_v2(Bucket=B)['Contents']]\n\
         assert keys == ['a', 'c/d'], keys\n\
         for key, body in [('a', b'1'), ('c/d', b'2')]:\n    \
             assert s3.get_object(Bucket=B, Key=key)['Body'].read() == body\n",
    );
}

/// A credential ends after hours, here after seconds. Clients are told to try again, the log says what to do, and
/// SIGHUP has the gateway use the new one.
#[test]
fn a_credential_that_ends_is_renewed() {
    if !boto::is_there() {
        return;
    }
    let (provider, mut lab) = chain("8");
    lab.start();
    let becomes = |code: &str, before: &str| {
        lab.python(&format!(
            "from botocore.exceptions import ClientError\n\
             for _ in range(600):\n    \
                 try:\n        s3.list_objects_v2(Bucket='alice-c')\n        code = 'ok'\n    \
                 except ClientError as error: code = error.response['Error']['Code']\n    \
                 if code == {code:?}: break\n    \
                 assert code == {before:?}, code\n    \
                 time.sleep(0.1)\n\
             assert code == {code:?}, code\n"
        ));
    };
    becomes("ServiceUnavailable", "NoSuchBucket");
    until("it is said", || lab.log().contains("has expired; write a new one to provider.credentials and send SIGHUP"));
    // A file that is none changes nothing.
    lab.write("provider.toml", "access_key = 7\n");
    lab.signal("HUP");
    until("it is refused", || lab.log().contains("the provider's credentials are not taken"));
    becomes("ServiceUnavailable", "ServiceUnavailable");
    renew(&provider, &lab, "3600");
    lab.signal("HUP");
    becomes("NoSuchBucket", "ServiceUnavailable");
    lab.python("s3.create_bucket(Bucket='alice-c')\ns3.put_object(Bucket='alice-c', Key='k', Body=b'x')");
    // Revoked: that is the operator's to find out.
    run(provider.policy("acme", &["revoke"]).arg(provider.manager("acme")).arg("gateway"));
    becomes("InternalError", "ok");
    assert!(lab.log().contains("the provider refuses the gateway"), "{}", lab.log());
    let secret = fs::read_to_string(lab.path("provider.toml")).expect("reads");
    let secret = secret.split("secret_key = \"").nth(1).and_then(|rest| rest.split('"').next()).expect("a secret");
    assert!(!lab.log().contains(secret) && !provider.log().contains(secret));
}
