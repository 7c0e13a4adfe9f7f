//! A host of a later version, which says more than this server knows.

use crate::common::raw::*;
use crate::common::*;
use lamassu_anchor::table::{self, Change, Space};
use lamassu_rpc::proto::alerts_client::AlertsClient;
use lamassu_rpc::proto::{self, down};
use prost::Message;
use prost::bytes::{Buf, BufMut};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio::task::block_in_place;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// Messages as bytes.
#[derive(Default)]
struct Bytes;

impl Codec for Bytes {
    type Encode = Vec<u8>;
    type Decode = Vec<u8>;
    type Encoder = Bytes;
    type Decoder = Bytes;

    fn encoder(&mut self) -> Bytes {
        Bytes
    }

    fn decoder(&mut self) -> Bytes {
        Bytes
    }
}

impl Encoder for Bytes {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, message: Vec<u8>, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put_slice(&message);
        Ok(())
    }
}

impl Decoder for Bytes {
    type Item = Vec<u8>;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Vec<u8>>, Status> {
        let mut message = vec![0; from.remaining()];
        from.copy_to_slice(&mut message);
        Ok(Some(message))
    }
}

/// With a number and bytes in fields that no version has yet.
fn newer(mut message: Vec<u8>) -> Vec<u8> {
    message.extend([0xc0, 0x3e, 5, 0xca, 0x3e, 3, b'n', b'e', b'w']);
    message
}

/// A message in a field of another.
fn field(number: u8, message: &[u8]) -> Vec<u8> {
    let mut bytes = vec![number << 3 | 2];
    prost::encoding::encode_varint(message.len() as u64, &mut bytes);
    bytes.extend(message);
    bytes
}

#[test]
fn what_a_newer_host_says_beyond_what_the_server_knows_is_ignored() {
    let lab = Lab::new();
    let id = lab.vault(lab.joined("a"));
    let anchor = lab.path(&format!("server/anchors/{}.anchor", id.replace('-', "")));
    Runtime::new().unwrap().block_on(async {
        let calls = channel(&lab, "a");
        let (says, said) = mpsc::channel(8);
        let up = |number, message: Vec<u8>| newer(field(number, &newer(message)));
        says.send(up(1, begin(&id_of(&id), true).encode_to_vec())).await.unwrap();
        let mut grpc = Grpc::new(calls.clone());
        grpc.ready().await.unwrap();
        let path = http::uri::PathAndQuery::from_static("/lamassu.v1.Sessions/Attend");
        let attended = grpc.streaming(tonic::Request::new(ReceiverStream::new(said)), path, Bytes).await.unwrap();
        let mut hears = attended.into_inner();
        let mut hear = async || {
            let message = tokio::time::timeout(PATIENCE, hears.message()).await.unwrap().unwrap().unwrap();
            proto::Down::decode(&message[..]).unwrap().said.unwrap()
        };
        let down::Said::Begun(begun) = hear().await else { panic!("no session") };
        says.send(up(3, proto::Heartbeat { beat: 7 }.encode_to_vec())).await.unwrap();
        assert_eq!(hear().await, down::Said::Alive(proto::Heartbeat { beat: 7 }));
        says.send(up(4, proto::Acquire { request: 1, object: 0, mode: 1 }.encode_to_vec())).await.unwrap();
        let down::Said::Granted(granted) = hear().await else { panic!("no grant") };
        // A commit: the row is there, and nothing else.
        let before = block_in_place(|| rows(&anchor)).1;
        let change = Change { space: Space::Held, key: vec![7; 16], value: Some(vec![1; 512]) };
        let of = newer(proto::Of { vault: id_of(&id), session: begun.session }.encode_to_vec());
        let mut commit = [field(1, &of), field(2, &granted.head), field(3, &table::pack([&change]))].concat();
        prost::encoding::uint64::encode(4, &granted.grant.unwrap_or_default().number, &mut commit);
        let path = http::uri::PathAndQuery::from_static("/lamassu.v1.Anchors/Commit");
        grpc.ready().await.unwrap();
        let made = grpc.unary(tonic::Request::new(newer(commit)), path, Bytes).await.unwrap().into_inner();
        let head = proto::State::decode(&made[..]).unwrap().head;
        let (now, mut after) = block_in_place(|| rows(&anchor));
        assert_eq!(now.unwrap().0[..], head);
        after.retain(|row| *row != change);
        let others = |rows: Vec<Change>| rows.into_iter().filter(|row| row.space != Space::Head).collect::<Vec<_>>();
        assert_eq!(others(after), others(before));
        // What is released is free for others.
        let mut release = newer(proto::Release { grant: None, keeps: None }.encode_to_vec());
        release.extend(field(1, &newer(granted.grant.unwrap().encode_to_vec())));
        says.send(up(5, release)).await.unwrap();
        let mut other = Attended::begin(&calls, begin(&id_of(&id), true)).await.unwrap();
        assert_eq!(other.acquire().await.head, head);
        // An event with a member that is not known.
        let event = r#"{"time":1,"kind":"stale","path":"p","found_by":"read","is_damage":true,"text":"t","new":[1]}"#;
        let findings = proto::Findings { vault: id_of(&id), events: vec![event.into()], lost: 0 };
        AlertsClient::new(calls.clone()).report(findings).await.unwrap();
    });
    assert!(lab.serve(&["alerts", "list"]).ok().out.contains("stale"));
}
