//! A provider's access proxy, two tenants with their policy managers, and their people with ordinary clients.

use crate::boto;
use crate::lab::{PATIENCE, free_port, has, program, run, until};
use std::fs;
use std::io::{BufRead, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Rules of a tenant: finance reads and lists reports, writes and deletes what is its own; contractors nothing secret.
const RULES: &str = r#"
permit(principal, action in [Action::"read", Action::"list"], resource in Key::"reports")
when { principal has dept && ["finance", "audit"].contains(principal.dept) };
permit(principal, action, resource in Key::"reports/drafts")
when { principal has clearance && principal.clearance >= 3 };
permit(principal == User::"alice", action, resource in Key::"homestead/alice");
permit(principal, action == Action::"list", resource) when { principal.teams.contains("auditors") };
forbid(principal, action, resource in Key::"reports/secret") when { principal.teams.contains("contractors") };
"#;

/// What has to be nowhere at the provider.
const PLAIN: [&str; 14] = [
    "alice",
    "bob-the-builder",
    "eve-of-law",
    "finance",
    "audit",
    "clearance",
    "teams",
    "contractors",
    "auditors",
    "reports",
    "drafts",
    "secret-q3",
    "homestead",
    "the plan for the third quarter",
];

pub struct Provider {
    dir: tempfile::TempDir,
    pub port: u16,
    /// of each tenant
    limits: &'static str,
    proxy: Option<Child>,
}

pub struct Issued {
    json: String,
}

/// Rules are published once, and a busy machine takes its time: the age of revocations is tested elsewhere.
pub const PATIENT: &str = "status_seconds_max = 3600\n";

impl Provider {
    pub fn new(lines: &str) -> Provider {
        Provider::with_limits(lines, "")
    }

    fn with_limits(lines: &str, limits: &'static str) -> Provider {
        let dir = tempfile::tempdir().expect("a directory");
        let mut provider = Provider { dir, port: free_port(), limits, proxy: None };
        for name in ["provider", "provider/published", "provider/published/acme", "provider/published/zeta", "tenants"]
        {
            fs::create_dir(provider.path(name)).expect("a directory");
        }
        // Of a tenant the provider needs a public key, and a tenant needs that of the proxy.
        let zeros = "0".repeat(64);
        provider.configure(lines, &zeros, &zeros);
        let proxy = run(provider.proxy_command().arg("--public-key")).trim().to_owned();
        let keys = ["acme", "zeta"].map(|tenant| {
            run(provider.lamassu().args(["key", "generate"]).arg(provider.path(&format!("tenants/{tenant}.key"))));
            let init = ["init", "--bucket", tenant, "--provider", &proxy];
            let public = run(provider.policy(tenant, &init).arg(provider.path(&format!("tenants/{tenant}"))));
            public.trim().to_owned()
        });
        provider.configure(lines, &keys[0], &keys[1]);
        for tenant in ["acme", "zeta"] {
            provider.staff(tenant);
        }
        provider.start();
        provider
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn configure(&self, lines: &str, acme: &str, zeta: &str) {
        let dir = self.dir.path().join("provider");
        let tenant = |bucket: &str, key: &str| {
            format!(
                "[[tenant]]\nbucket = \"{bucket}\"\nkey = \"{key}\"\npublished = \"{}/published/{bucket}\"\n\
                 limits = {{ {} }}\n",
                dir.display(),
                self.limits
            )
        };
        let text = format!(
            "store = \"{0}/store\"\nstate = \"{0}/state\"\nlisten = \"127.0.0.1:{1}\"\nlog_keys = true\n{lines}{2}{3}",
            dir.display(),
            self.port,
            tenant("acme", acme),
            tenant("zeta", zeta)
        );
        fs::write(dir.join("proxy.toml"), text).expect("writes");
    }

    fn staff(&self, tenant: &str) {
        let set = |words: &[&str]| {
            let (what, rest) = words.split_at(2);
            run(self.policy(tenant, what).arg(self.manager(tenant)).args(rest));
        };
        set(&["attribute", "set", "dept", "text"]);
        set(&["attribute", "set", "teams", "set"]);
        set(&["attribute", "set", "clearance", "number"]);
        set(&["person", "set", "alice", "dept=finance", "clearance=4"]);
        set(&["person", "set", "bob-the-builder", "dept=audit", "clearance=2", "teams=contractors", "teams=auditors"]);
        set(&["person", "set", "eve-of-law", "dept=law"]);
        let rules = self.path("tenants/rules.cedar");
        fs::write(&rules, RULES).expect("writes");
        set(&["rule", "set", "all", rules.to_str().expect("a path")]);
        let to = self.path(&format!("provider/published/{tenant}"));
        run(self.policy(tenant, &["publish"]).arg("--to").arg(to).arg(self.manager(tenant)));
    }

    pub fn manager(&self, tenant: &str) -> PathBuf {
        self.path(&format!("tenants/{tenant}"))
    }

    fn lamassu(&self) -> Command {
        let mut command = Command::new(program());
        command.env("HOME", self.path("tenants")).env("LAMASSU_SYSLOG", self.path("nowhere"));
        command
    }

    pub fn policy(&self, tenant: &str, words: &[&str]) -> Command {
        let mut command = self.lamassu();
        let key = format!("raw:file:{}", self.path(&format!("tenants/{tenant}.key")).display());
        command.env("LAMASSU_POLICY_KEY", key).arg("policy").args(words);
        command
    }

    pub fn publish(&self, tenant: &str) {
        run(self.policy(tenant, &["publish"]).arg(self.manager(tenant)));
    }

    pub fn issue(&self, tenant: &str, person: &str, more: &[&str]) -> Issued {
        Issued { json: run(self.policy(tenant, &["issue"]).args(more).arg(self.manager(tenant)).arg(person)) }
    }

    /// The key at the provider of a plain one.
    fn key(&self, tenant: &str, plain: &str) -> String {
        run(self.policy(tenant, &["name"]).arg(self.manager(tenant)).arg(plain)).trim().to_owned()
    }

    fn proxy_command(&self) -> Command {
        let mut command = self.lamassu();
        command.args(["-v", "gateway", "provider", "--config"]).arg(self.path("provider/proxy.toml"));
        command
    }

    pub fn start(&mut self) {
        let log = fs::File::options().create(true).append(true).open(self.path("provider/log")).expect("a log");
        let mut command = self.proxy_command();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.proxy = Some(command.spawn().expect("it starts"));
        until("the proxy listens", || TcpStream::connect(("127.0.0.1", self.port)).is_ok());
    }

    pub fn stop(&mut self) {
        let mut child = self.proxy.take().expect("it runs");
        run(Command::new("kill").arg("-TERM").arg(child.id().to_string()));
        assert_eq!(child.wait().expect("a child").code(), Some(0));
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.path("provider/log")).unwrap_or_default()
    }

    fn client(&self, program: &str, issued: &Issued) -> Command {
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", "300", program]).env("HOME", self.path("tenants"));
        for name in [
            "AWS_CA_BUNDLE",
            "AWS_PROFILE",
            "AWS_ENDPOINT_URL",
            "HTTP_PROXY",
            "http_proxy",
            "HTTPS_PROXY",
            "https_proxy",
        ] {
            command.env_remove(name);
        }
        command.env("AWS_ACCESS_KEY_ID", issued.field("AccessKeyId"));
        command.env("AWS_SECRET_ACCESS_KEY", issued.field("SecretAccessKey"));
        command.env("AWS_SESSION_TOKEN", issued.field("SessionToken"));
        command.env("AWS_EC2_METADATA_DISABLED", "true").env("AWS_DEFAULT_REGION", "us-east-1");
        command.env("URL", format!("http://127.0.0.1:{}", self.port)).env("ISSUED", &issued.json);
        command
    }

    /// Runs lines of Python, behind `provider.py`.
    #[track_caller]
    pub fn python(&self, issued: &Issued, lines: &str) -> String {
        const HEAD: &str = include_str!("provider.py");
        run(self.client("/usr/bin/python3", issued).arg("-c").arg(HEAD.to_owned() + lines))
    }

    /// Files of the provider that contain a plain text, in their name or content.
    pub fn found(&self, text: &str) -> Vec<PathBuf> {
        fn walk(dir: &Path, each: &mut dyn FnMut(&Path)) {
            for entry in fs::read_dir(dir).expect("a directory") {
                let path = entry.expect("an entry").path();
                each(&path);
                if path.is_dir() {
                    walk(&path, each);
                }
            }
        }
        let mut found = Vec::new();
        let root = self.path("provider");
        walk(&root, &mut |path| {
            let name = path.strip_prefix(&root).expect("below").as_os_str().as_encoded_bytes();
            let content = if path.is_file() { fs::read(path).expect("reads") } else { Vec::new() };
            let has = |bytes: &[u8]| memchr::memmem::find(bytes, text.as_bytes()).is_some();
            if has(name) || has(&content) {
                found.push(path.to_owned());
            }
        });
        found
    }
}

impl Issued {
    fn field(&self, name: &str) -> String {
        let behind = self.json.split(&format!("\"{name}\": \"")).nth(1).expect("a field");
        behind.split('"').next().expect("a text").to_owned()
    }
}

impl Drop for Provider {
    fn drop(&mut self) {
        if let Some(mut child) = self.proxy.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            eprintln!("{}", self.log());
        }
    }
}

/// A ciphertext object: of a vault's file, as it lies in the store.
fn ciphertext(provider: &Provider) -> PathBuf {
    let (vault, key, plain) = (provider.path("vault"), provider.path("vault.key"), provider.path("plan"));
    run(provider.lamassu().args(["key", "generate"]).arg(&key));
    let source = format!("raw:file:{}", key.display());
    let lamassu = || {
        let mut command = provider.lamassu();
        command.env("LAMASSU_KEY", &source).env("XDG_STATE_HOME", provider.path("tenants"));
        command
    };
    run(lamassu().args(["init", "--anchor", "none"]).arg(&vault));
    fs::write(&plain, "the plan for the third quarter\n".repeat(1000)).expect("writes");
    run(lamassu().arg("cp").arg(&vault).arg(&plain).arg("vault:plan"));
    vault.join(run(lamassu().arg("path").arg(&vault).arg("plan")).trim())
}

/// Allowed: drafts by clearance, the home by name. Denied: reports are read only, others' homes, unknown folders.
const WHAT_ALICE_MAY: &str = "s3.put_object(Bucket=B, Key=DRAFT, Body=BODY)\n\
    s3.put_object(Bucket=B, Key=HOME, Body=BODY)\n\
    assert s3.get_object(Bucket=B, Key=DRAFT)['Body'].read() == BODY\n\
    fails('AccessDenied', s3.put_object, Bucket=B, Key=REPORT, Body=BODY)\n\
    fails('AccessDenied', s3.put_object, Bucket=B, Key='unsealed', Body=b'x')\n\
    fails('AccessDenied', s3.copy_object, Bucket=B, Key=REPORT, CopySource={'Bucket': B, 'Key': DRAFT})\n\
    fails('NoSuchKey', s3.get_object, Bucket=B, Key=REPORT)\n\
    fails('AccessDenied', s3.get_object, Bucket=B, Key='unsealed')\n\
    fails(403, s3.head_object, Bucket=B, Key='unsealed')\n\
    s3.copy_object(Bucket=B, Key=HOME + '3', CopySource={'Bucket': B, 'Key': DRAFT})\n\
    up = s3.create_multipart_upload(Bucket=B, Key=DRAFT + '-parts')['UploadId']\n\
    part = s3.upload_part(Bucket=B, Key=DRAFT + '-parts', UploadId=up, PartNumber=1, Body=BODY)['ETag']\n\
    s3.complete_multipart_upload(Bucket=B, Key=DRAFT + '-parts', UploadId=up, \
    MultipartUpload={'Parts': [{'PartNumber': 1, 'ETag': part}]})\n\
    fails('AccessDenied', s3.create_multipart_upload, Bucket=B, Key=REPORT)\n\
    found = [one['Key'] for one in s3.list_objects_v2(Bucket=B, Prefix=FOLDER)['Contents']]\n\
    assert sorted(found) == sorted([DRAFT, DRAFT + '-parts']), found\n\
    fails('AccessDenied', s3.list_objects_v2, Bucket=B)\n\
    assert [one['Name'] for one in s3.list_buckets()['Buckets']] == [B]\n\
    fails('AccessDenied', s3.create_bucket, Bucket='acme-2')\n\
    fails('AccessDenied', s3.delete_bucket, Bucket=B)\n\
    done = s3.delete_objects(Bucket=B, Delete={'Objects': [{'Key': DRAFT + '-parts'}, {'Key': REPORT}]})\n\
    assert [one['Key'] for one in done['Deleted']] == [DRAFT + '-parts'], done\n\
    assert [(one['Key'], one['Code']) for one in done['Errors']] == [(REPORT, 'AccessDenied')], done\n\
    url = s3.generate_presigned_url('get_object', Params={'Bucket': B, 'Key': DRAFT}, ExpiresIn=60)\n\
    assert urllib.request.urlopen(url).read() == BODY\n";

#[test]
fn rules_that_the_provider_cannot_read_decide() {
    if !boto::is_there() {
        return;
    }
    let mut provider = Provider::new(PATIENT);
    let [alice, bob, eve] = ["alice", "bob-the-builder", "eve-of-law"].map(|name| provider.issue("acme", name, &[]));
    let object = ciphertext(&provider);
    let [report, draft, secret, home] =
        ["reports/q3", "reports/drafts/q3", "reports/secret/secret-q3", "homestead/alice/x"]
            .map(|key| provider.key("acme", key));
    let (folder, secrets) = (provider.key("acme", "reports/"), provider.key("acme", "reports/secret/"));
    let names = format!(
        "B = 'acme'\nREPORT, DRAFT, SECRET, HOME = '{report}', '{draft}', '{secret}', '{home}'\n\
         FOLDER, SECRETS = '{folder}', '{secrets}'\nBODY = open('{}', 'rb').read()\n",
        object.display()
    );
    provider.python(&alice, &(names.clone() + WHAT_ALICE_MAY));
    // Deny overrides, also in lists: an object is there, and a contractor's list does not have it.
    let store = provider.path("provider/store/acme").join(&secret);
    fs::create_dir_all(store.parent().expect("a folder")).expect("a directory");
    fs::copy(&object, &store).expect("copies");
    provider.python(
        &bob,
        &(names.clone()
            + "assert s3.get_object(Bucket=B, Key=DRAFT)['Body'].read() == BODY\n\
               fails('AccessDenied', s3.get_object, Bucket=B, Key=SECRET)\n\
               fails('AccessDenied', s3.list_objects_v2, Bucket=B, Prefix=SECRETS)\n\
               fails('AccessDenied', s3.put_object, Bucket=B, Key=DRAFT, Body=b'x')\n\
               fails('AccessDenied', s3.delete_object, Bucket=B, Key=DRAFT)\n\
               found = [one['Key'] for one in s3.list_objects_v2(Bucket=B)['Contents']]\n\
               assert DRAFT in found and HOME in found and SECRET not in found, found\n\
               fails('AccessDenied', s3.get_object, Bucket=B, Key=HOME)\n"),
    );
    provider.python(&alice, &(names.clone() + "assert s3.get_object(Bucket=B, Key=SECRET)['Body'].read() == BODY\n"));
    provider.python(
        &eve,
        &(names.clone()
            + "for key in [REPORT, DRAFT, HOME, SECRET]:\n    fails('AccessDenied', s3.get_object, Bucket=B, Key=key)\n\
               fails('AccessDenied', s3.list_objects_v2, Bucket=B, Prefix=FOLDER)\n"),
    );
    // Across tenants: another bucket, and the other tenant's name for the same.
    let stranger = provider.issue("zeta", "alice", &[]);
    provider.python(
        &stranger,
        &(names.clone()
            + "for bucket in ['acme', 'nowhere']:\n    \
               fails('AccessDenied', s3.get_object, Bucket=bucket, Key=DRAFT)\n    \
               fails('AccessDenied', s3.list_objects_v2, Bucket=bucket)\n    \
               fails('AccessDenied', s3.put_object, Bucket=bucket, Key=HOME, Body=b'x')\n\
               fails('AccessDenied', s3.get_object, Bucket='zeta', Key=DRAFT)\n\
               assert [one['Name'] for one in s3.list_buckets()['Buckets']] == ['zeta']\n"),
    );
    // An ordinary tool, and `lamassu cat` of what it has downloaded.
    if has("aws") {
        let copy = provider.path("copy");
        let mut aws = provider.client("aws", &alice);
        aws.arg("--endpoint-url").arg(format!("http://127.0.0.1:{}", provider.port));
        run(aws.args(["s3", "cp", &format!("s3://acme/{draft}")]).arg(&copy));
        assert_eq!(fs::read(&copy).expect("reads"), fs::read(&object).expect("reads"));
    }
    // The whole disk of the provider.
    provider.publish("acme");
    provider.stop();
    for text in PLAIN {
        assert_eq!(provider.found(text), Vec::<PathBuf>::new(), "{text}");
    }
    assert!(!provider.found("acme").is_empty(), "the search finds what is there");
    // What the provider learns, by its own files.
    let file = provider.path("eve.json");
    fs::write(&file, &bob.json).expect("writes");
    let leak = |more: &[String]| {
        let mut command = provider.lamassu();
        command.args(["policy", "leak", "--config"]).arg(provider.path("provider/proxy.toml"));
        run(command.args(more).arg("acme"))
    };
    let alone = leak(&[]);
    assert!(alone.contains("4 that permit, 1 that forbid") && !alone.contains("finance"), "{alone}");
    let insider = format!("--insider={},dept=audit,clearance=2,teams=contractors,teams=auditors", file.display());
    let helped = leak(&[insider]);
    assert!(helped.contains("is one of") && helped.contains("dept=audit"), "{helped}");
}

#[test]
fn credentials_end_and_are_not_made_up() {
    if !boto::is_there() {
        return;
    }
    let mut provider = Provider::new("status_seconds_max = 600\n");
    let key = provider.key("acme", "homestead/alice/x");
    let names = format!("B, KEY = 'acme', '{key}'\n");
    let alice = provider.issue("acme", "alice", &[]);
    let other = provider.issue("acme", "alice", &[]);
    let stranger = provider.issue("zeta", "alice", &[]);
    let short = provider.issue("acme", "alice", &["--seconds", "2"]);
    provider.python(&alice, &(names.clone() + "s3.put_object(Bucket=B, Key=KEY, Body=b'ciphertext')\n"));
    // Forged: parts of two credentials, a changed token, the token of another tenant, none, a secret that is a guess.
    let forged = format!(
        "OTHER, STRANGER = json.loads('''{}'''), json.loads('''{}''')\n\
         ask = lambda s3: dict(call=s3.get_object, Bucket=B, Key=KEY)\n\
         fails('SignatureDoesNotMatch', **ask(client(ISSUED, SecretAccessKey=OTHER['SecretAccessKey'])))\n\
         fails('SignatureDoesNotMatch', **ask(client(ISSUED, SecretAccessKey='x' * 40)))\n\
         fails('InvalidAccessKeyId', **ask(client(ISSUED, AccessKeyId=OTHER['AccessKeyId'])))\n\
         fails('InvalidAccessKeyId', **ask(client(ISSUED, SessionToken=OTHER['SessionToken'])))\n\
         fails('InvalidAccessKeyId', **ask(client(ISSUED, SessionToken=STRANGER['SessionToken'])))\n\
         fails('AccessDenied', **ask(client(ISSUED, SessionToken=None)))\n\
         token = ISSUED['SessionToken']\n\
         for at in [0, 3, 10, 200, len(token) - 100, len(token) - 1]:\n    \
             changed = token[:at] + ('A' if token[at] != 'A' else 'B') + token[at + 1:]\n    \
             fails('InvalidToken', **ask(client(ISSUED, SessionToken=changed)))\n\
         for made_up in ['x', 'v4.public.AAAA', token + '.AAAA', token.replace('v4', 'v3', 1)]:\n    \
             fails('InvalidToken', **ask(client(ISSUED, SessionToken=made_up)))\n",
        other.json, stranger.json
    );
    provider.python(&alice, &(names.clone() + &forged));
    // Replayed: a captured request, as it is, for another object, with another time; a URL after its end.
    let replayed = "url, headers = captured(s3.get_object, Bucket=B, Key=KEY)\n\
        assert ask(url, headers)[0] == 200\n\
        code, said = ask(url + '2', headers)\nassert code == 403 and 'SignatureDoesNotMatch' in said, said\n\
        then = time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(time.time() - 16 * 60))\n\
        code, said = ask(url, {**headers, 'X-Amz-Date': then})\nassert code == 403, said\n\
        url = s3.generate_presigned_url('get_object', Params={'Bucket': B, 'Key': KEY}, ExpiresIn=1)\n\
        for _ in range(1200):\n    code = ask(url)[0]\n    if code != 200: break\n    time.sleep(0.1)\n\
        assert code == 403, code\n";
    provider.python(&alice, &(names.clone() + replayed));
    // Expired, by the proxy's clock.
    provider.python(&short, &(names.clone() + "becomes('ExpiredToken', 'ok', s3.get_object, Bucket=B, Key=KEY)\n"));
    // Revoked: one, then all of a person. It stays so if somebody puts the earlier list back, and after a restart.
    let published = provider.path("provider/published/acme/status.paseto");
    let before = fs::read(&published).expect("reads");
    run(provider.policy("acme", &["revoke"]).arg(provider.manager("acme")).arg(alice.field("AccessKeyId")));
    let ends = |code: &str| format!("{names}becomes('{code}', 'ok', s3.get_object, Bucket=B, Key=KEY)\n");
    provider.python(&alice, &ends("AccessDenied"));
    provider.python(&other, &(names.clone() + "s3.get_object(Bucket=B, Key=KEY)\n"));
    fs::write(&published, before).expect("writes");
    until("the old list is refused", || provider.log().contains("was taken before"));
    provider.python(&alice, &(names.clone() + "fails('AccessDenied', s3.get_object, Bucket=B, Key=KEY)\n"));
    provider.stop();
    provider.start();
    // Now nothing is in force that is new enough, so nobody is served.
    provider.python(&other, &(names.clone() + "fails('ServiceUnavailable', s3.get_object, Bucket=B, Key=KEY)\n"));
    provider.publish("acme");
    let works = "becomes('ok', 'ServiceUnavailable', s3.get_object, Bucket=B, Key=KEY)\n";
    provider.python(&other, &(names.clone() + works));
    provider.python(&alice, &(names.clone() + "fails('AccessDenied', s3.get_object, Bucket=B, Key=KEY)\n"));
    // Another epoch: everybody needs another credential.
    run(provider.policy("acme", &["rotate"]).arg(provider.manager("acme")));
    provider.python(&other, &ends("ExpiredToken"));
    let again = provider.issue("acme", "alice", &[]);
    provider.python(&again, &(names.clone() + "s3.get_object(Bucket=B, Key=KEY)\n"));
    // Who is removed.
    run(provider.policy("acme", &["person", "remove"]).arg(provider.manager("acme")).arg("alice"));
    provider.publish("acme");
    provider.python(&again, &ends("AccessDenied"));
    assert!(!provider.log().contains("panick") && !provider.log().contains(&*again.field("SecretAccessKey")));
}

/// An upload and an answer that have begun when their credential is revoked.
#[test]
fn what_has_begun_ends_with_its_credential() {
    if !boto::is_there() {
        return;
    }
    let provider = Provider::new("status_seconds_max = 600\n");
    let (key, large) = (provider.key("acme", "homestead/alice/x"), provider.key("acme", "homestead/alice/y"));
    let (alice, other) = (provider.issue("acme", "alice", &[]), provider.issue("acme", "alice", &[]));
    let (begun, go) = (provider.path("begun"), provider.path("go"));
    let lines = format!(
        "import http.client, os, urllib.parse\nB, KEY, LARGE, N = 'acme', '{key}', '{large}', 32 << 20\n\
         s3.put_object(Bucket=B, Key=KEY, Body=b'old')\ns3.put_object(Bucket=B, Key=LARGE, Body=bytes(N))\n\
         def open_url(method, key):\n    \
             url = urllib.parse.urlsplit(s3.generate_presigned_url(method, Params={{'Bucket': B, 'Key': key}}))\n    \
             return http.client.HTTPConnection(url.netloc, timeout=60), url.path + '?' + url.query\n\
         put, path = open_url('put_object', KEY)\n\
         put.putrequest('PUT', path)\nput.putheader('content-length', str(N))\nput.endheaders()\nput.send(bytes(N // 2))\n\
         get, path = open_url('get_object', LARGE)\n\
         get.request('GET', path)\nanswer = get.getresponse()\nassert answer.status == 200, answer.status\nanswer.read(1)\n\
         open({begun:?}, 'w').close()\nwhile not os.path.exists({go:?}): time.sleep(0.05)\n\
         becomes('AccessDenied', 'ok', s3.get_object, Bucket=B, Key=KEY)\n\
         try:\n    put.send(bytes(N // 2))\nexcept OSError: pass\n\
         try: said = put.getresponse()\nexcept OSError: said = None\n\
         assert said is None or (said.status == 403 and b'AccessDenied' in said.read()), said.status\n\
         try:\n    answer.read()\n    assert False, 'all of it came'\nexcept (http.client.IncompleteRead, OSError): pass\n"
    );
    std::thread::scope(|threads| {
        let client = threads.spawn(|| provider.python(&alice, &lines));
        until("both have begun", || begun.exists() || client.is_finished());
        run(provider.policy("acme", &["revoke"]).arg(provider.manager("acme")).arg(alice.field("AccessKeyId")));
        provider.publish("acme");
        fs::write(&go, "").expect("writes");
    });
    let unchanged = format!("assert s3.get_object(Bucket='acme', Key='{key}')['Body'].read() == b'old'\n");
    provider.python(&other, &unchanged);
    assert!(provider.log().contains("an answer is cut off"));
}

/// The second would take for a leftover what the first is writing.
#[test]
fn a_second_proxy_on_a_store_ends_and_changes_nothing() {
    if !boto::is_there() {
        return;
    }
    let provider = Provider::new(PATIENT);
    let (alice, key) = (provider.issue("acme", "alice", &[]), provider.key("acme", "reports/drafts/slow"));
    let lines = format!(
        "import http.client, pathlib, urllib.parse\n\
         url = urllib.parse.urlsplit(s3.generate_presigned_url('put_object', Params=dict(Bucket='acme', Key='{key}')))\n\
         to = http.client.HTTPConnection(url.netloc, timeout=120)\n\
         to.putrequest('PUT', url.path + '?' + url.query)\nto.putheader('content-length', str(4 << 20))\nto.endheaders()\n\
         to.send(bytes(3 << 20))\n\
         while not (pathlib.Path.home() / 'go').exists(): time.sleep(0.02)\n\
         to.send(bytes(1 << 20))\nassert to.getresponse().status == 200\n"
    );
    let written = || {
        let names = fs::read_dir(provider.path("provider/store/acme")).expect("a directory").flatten();
        let mut files = names.filter(|name| name.file_name().as_encoded_bytes().starts_with(b".lamassu-put-"));
        files.next().and_then(|file| file.metadata().ok())
    };
    std::thread::scope(|scope| {
        let put = scope.spawn(|| provider.python(&alice, &lines));
        until("it is being written", || written().is_some_and(|file| file.len() >= 2 << 20) || put.is_finished());
        let config = fs::read_to_string(provider.path("provider/proxy.toml")).expect("reads");
        let other = |name: &str, from: &str, to: &str| {
            let config = config.replace(&provider.port.to_string(), &free_port().to_string()).replace(from, to);
            fs::write(provider.path(name), config).expect("writes");
            let mut second = provider.lamassu();
            second.args(["-v", "gateway", "provider", "--config"]).arg(provider.path(name));
            second.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
            let mut second = second.spawn().expect("it starts");
            let mut said = String::new();
            for line in std::io::BufReader::new(second.stderr.take().expect("piped")).lines().map_while(Result::ok) {
                said += &(line + "\n");
                if said.contains("is removed") {
                    let _ = second.kill();
                }
            }
            (second.wait().expect("a child").code(), said)
        };
        let both = [("a", "/state\"", "/state-of-another\""), ("b", "/store\"", "/store-of-another\"")];
        let ended = both.map(|(name, from, to)| other(name, from, to));
        fs::write(provider.path("tenants/go"), "").expect("writes");
        let put = put.join();
        for (code, said) in ended {
            assert!(code == Some(11) && said.contains("another `lamassu gateway provider` uses"), "{code:?} {said}");
        }
        put.expect("it is stored");
    });
}

#[test]
fn connections_of_one_tenant_are_bounded() {
    if !boto::is_there() {
        return;
    }
    let provider = Provider::with_limits(PATIENT, "connections_at_once = 3");
    let key = provider.key("acme", "homestead/alice/x");
    let (alice, other) = (provider.issue("acme", "alice", &[]), provider.issue("zeta", "alice", &[]));
    let put = |bucket: &str, key: &str| {
        format!("becomes('ok', 'ServiceUnavailable', s3.put_object, Bucket='{bucket}', Key='{key}', Body=b'x')\n")
    };
    provider.python(&alice, &put("acme", &key));
    let head = format!(
        "URL = s3.generate_presigned_url('get_object', Params={{'Bucket': 'acme', 'Key': '{key}'}})\n\
         ADDRESS, MOST = '127.0.0.1:{0}', 3\nPATH = URL.split(ADDRESS)[1]\n",
        provider.port
    );
    let go = provider.path("go");
    let wait = format!("open({go:?}, 'w').close()\nwhile os.path.exists({go:?}): time.sleep(0.05)\n");
    std::thread::scope(|threads| {
        let client = threads.spawn(|| provider.python(&alice, &(head + crate::tenants::CONNECTIONS + &wait)));
        until("all connections are there", || go.exists() || client.is_finished());
        // Another tenant is served meanwhile.
        provider.python(&other, &put("zeta", &provider.key("zeta", "homestead/alice/x")));
        fs::remove_file(&go).expect("it waits for that");
    });
    let refused = "refused: no right to the bucket user=";
    let stranger = format!("fails('AccessDenied', s3.get_object, Bucket='acme', Key='{key}')\n");
    provider.python(&other, &stranger);
    let is_told = |line: &str| line.contains(refused) && line.contains("tenant=\"zeta\"") && line.contains("\"acme\"");
    assert!(provider.log().lines().any(is_told), "{}", provider.log());
}

#[test]
fn an_old_list_of_revocations_serves_nobody_and_strangers_change_nothing() {
    if !boto::is_there() {
        return;
    }
    let provider = Provider::new("status_seconds_max = 5\n");
    let key = provider.key("acme", "homestead/alice/x");
    let alice = provider.issue("acme", "alice", &[]);
    let put = format!("s3.put_object, Bucket='acme', Key='{key}', Body=b'x'");
    provider.python(&alice, &format!("becomes('ServiceUnavailable', 'ok', {put})\n"));
    // A publisher that goes on.
    let mut every = provider.policy("acme", &["publish", "--every", "1"]);
    let mut child = every.arg(provider.manager("acme")).stdin(Stdio::null()).spawn().expect("it starts");
    provider.python(&alice, &format!("becomes('ok', 'ServiceUnavailable', {put})\n"));
    // Another command works beside it.
    provider.issue("acme", "alice", &[]);
    run(Command::new("kill").arg("-TERM").arg(child.id().to_string()));
    assert_eq!(child.wait().expect("a child").code(), Some(0));
    // What a stranger puts there is not taken.
    fs::write(provider.path("provider/published/acme/bundle.paseto"), "v4.public.AAAA").expect("writes");
    until("it is refused", || provider.log().contains("not taken"));
    // Without a signature, or with nonsense.
    for request in [
        format!("GET /acme/{key} HTTP/1.1\r\nhost: x\r\n"),
        format!("GET /acme/{key} HTTP/1.1\r\nhost: x\r\nx-amz-security-token: {}\r\n", alice.field("SessionToken")),
        format!(
            "GET /acme/{key}?X-Amz-Security-Token={}&X-Amz-Expires=60&X-Amz-SignedHeaders=host&X-Amz-Signature=0 \
             HTTP/1.1\r\nhost: x\r\n",
            alice.field("SessionToken")
        ),
    ] {
        let mut stream = TcpStream::connect(("127.0.0.1", provider.port)).expect("connects");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        stream.write_all(format!("{request}connection: close\r\n\r\n").as_bytes()).expect("writes");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("reads");
        assert!(answer.starts_with("HTTP/1.1 4") || answer.starts_with("HTTP/1.1 503"), "{request}: {answer}");
    }
    // The directories are the proxy's alone.
    let state = provider.path("provider/state");
    fs::set_permissions(&state, PermissionsExt::from_mode(0o750)).expect("chmod");
    let refused = provider.proxy_command().arg("--check-config").output().expect("runs");
    assert_eq!(refused.status.code(), Some(13), "{refused:?}");
}
