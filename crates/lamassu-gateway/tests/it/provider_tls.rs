//! A provider over TLS: a gateway sends nothing to one that its certificates do not vouch for, and says why.

use crate::boto;
use crate::lab::{Lab, text};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

/// A certificate authority: what signs, and its certificate.
fn authority(name: &str) -> (Issuer<'static, KeyPair>, String) {
    let mut params = CertificateParams::new(Vec::<String>::new()).expect("no names");
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().expect("a key");
    let certificate = params.self_signed(&key).expect("a certificate").pem();
    (Issuer::new(params, key), certificate)
}

/// Gives the provider a certificate for a name, which it uses from now on.
fn certify(provider: &Lab, by: &Issuer<'static, KeyPair>, name: &str, last_year: i32) {
    let mut params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
    params.not_before = rcgen::date_time_ymd(2001, 1, 1);
    params.not_after = rcgen::date_time_ymd(last_year, 1, 1);
    let key = KeyPair::generate().expect("a key");
    let certificate = params.signed_by(&key, by).expect("a certificate");
    provider.write("tls.crt", &certificate.pem());
    provider.write("tls.key", &key.serialize_pem());
}

#[test]
fn a_provider_is_known_by_its_certificate() {
    if !boto::is_there() {
        return;
    }
    let ((ours, our_ca), (_, other_ca)) = (authority("ours"), authority("another"));
    // A provider over TLS, itself a gateway over a vault, whose bucket is made before.
    let mut provider = Lab::new("");
    provider.python("s3.create_bucket(Bucket='alice-cloud')");
    assert_eq!(provider.stop("TERM"), Some(0));
    let dir = provider.dir.path().display().to_string();
    provider.configure(&format!("tls_certificate = \"{dir}/tls.crt\"\ntls_key = \"{dir}/tls.key\"\n"));

    let mut lab = Lab::without_gateway("");
    lab.write("provider.toml", "access_key = \"ALICE\"\nsecret_key = \"alice-secret-alice-secret\"\n");
    lab.write("ours.pem", &our_ca);
    lab.write("another.pem", &other_ca);
    let port = provider.port;
    let configure = |lab: &Lab, ca: &str| {
        lab.configure(&format!(
            "backend = \"s3://alice-cloud/objects\"\n[provider]\nendpoint = \"https://127.0.0.1:{port}\"\n\
             credentials = \"provider.toml\"\nretries = 0\n{ca}"
        ));
    };
    let (ca, other) = ("ca = \"ours.pem\"\n", "ca = \"another.pem\"\n");
    // What the provider shows, whom the gateway trusts, and why that is not enough.
    for (name, last_year, ca, why) in [
        ("127.0.0.1", 2099, other, "UnknownIssuer"),
        ("127.0.0.1", 2099, "", "UnknownIssuer"),
        ("127.0.0.1", 2002, ca, "expired"),
        ("s3.example.org", 2099, ca, "not valid for name"),
    ] {
        certify(&provider, &ours, name, last_year);
        provider.start();
        configure(&lab, ca);
        let out = lab.gateway().output().expect("it runs");
        let said = text(&out);
        assert!(out.status.code() == Some(13) && said.contains("no TLS with the provider"), "{why}: {said}");
        assert!(said.contains(why), "{why}: {said}");
        assert_eq!(provider.stop("TERM"), Some(0));
    }
    assert!(!provider.log().contains("user=\"alice\" operation=\"PutObject\""), "{}", provider.log());
    certify(&provider, &ours, "127.0.0.1", 2099);
    provider.start();
    configure(&lab, ca);
    lab.start();
    lab.python(
        "s3.create_bucket(Bucket='alice-b')\nbody = bytes(range(256)) * (20 << 12)\n\
         s3.put_object(Bucket='alice-b', Key='k', Body=body)\n\
         assert s3.get_object(Bucket='alice-b', Key='k')['Body'].read() == body",
    );
}
