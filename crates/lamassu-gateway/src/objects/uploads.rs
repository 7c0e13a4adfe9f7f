//! Pages of a bucket's uploads, by key, then by age. Uploads are met in no order and can be very many, so only those of
//! the page are kept, without their properties.

use super::Upload;
use std::collections::BTreeMap;

/// The parameters of a listing of uploads.
#[derive(Clone, Debug, Default)]
pub struct UploadQuery {
    /// prefix of keys
    pub prefix: String,
    /// keys are grouped up to this delimiter
    pub delimiter: Option<String>,
    /// only keys after this one
    pub after: Option<String>,
    /// only later uploads to that key than this one; if it has ended, all uploads to that key
    pub after_id: Option<String>,
    /// most uploads and groups
    pub max: usize,
}

/// An upload of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// its key
    pub key: String,
    /// its id
    pub id: String,
    /// when it began, seconds since 1970
    pub begun: u64,
    /// the user who began it
    pub user: String,
}

/// A page.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct UploadPage {
    /// in order
    pub uploads: Vec<Listed>,
    /// common parts of keys up to the delimiter after the prefix
    pub groups: Vec<String>,
    /// start of the next page: after this key or group, and after this upload to the key
    pub next: Option<(String, Option<String>)>,
}

/// A page that is being made. `may_list`: whether the user may list a folder.
pub struct Paging<'a> {
    query: &'a UploadQuery,
    may_list: &'a dyn Fn(&str) -> bool,
    /// When the upload that the page starts after began.
    after_begun: Option<u64>,
    /// Uploads by key, age and id, with the user; groups by name, with `None`. One more than the page has.
    found: BTreeMap<(String, u64, String), Option<String>>,
}

impl<'a> Paging<'a> {
    /// A page without uploads. `marker` is the upload whose id the query names, if it exists.
    pub fn new(query: &'a UploadQuery, may_list: &'a dyn Fn(&str) -> bool, marker: Option<&Upload>) -> Paging<'a> {
        let after_begun = marker.filter(|marker| Some(&marker.key) == query.after.as_ref()).map(|marker| marker.begun);
        Paging { query, may_list, after_begun, found: BTreeMap::new() }
    }

    /// Adds an upload if it belongs to the page.
    pub fn offer(&mut self, id: &str, upload: &Upload) {
        let Some(rest) = upload.key.strip_prefix(&*self.query.prefix) else { return };
        let delimiter = self.query.delimiter.as_deref();
        let group = delimiter.and_then(|delimiter| Some(rest.find(delimiter)? + delimiter.len()));
        let (at, user) = match group {
            Some(len) => ((upload.key[..self.query.prefix.len() + len].to_owned(), 0, String::new()), None),
            None => ((upload.key.clone(), upload.begun, id.to_owned()), Some(upload.user.clone())),
        };
        if !self.is_behind(&at, group.is_some()) || self.found.contains_key(&at) || self.is_beyond(&at) {
            return;
        }
        if (self.may_list)(super::list::folder_of(&upload.key)) {
            self.found.insert(at, user);
        }
        if self.found.len() > self.query.max + 1 {
            self.found.pop_last();
        }
    }

    fn is_behind(&self, (key, begun, id): &(String, u64, String), is_group: bool) -> bool {
        let Some(after) = &self.query.after else { return true };
        match (self.after_begun, &self.query.after_id) {
            (Some(after_begun), Some(after_id)) if key == after && !is_group => (*begun, id) > (after_begun, after_id),
            // That upload has ended, so its time is unknown: all uploads to its key are listed.
            (None, Some(_)) if !is_group => key >= after,
            _ => key > after,
        }
    }

    fn is_beyond(&self, at: &(String, u64, String)) -> bool {
        self.found.len() > self.query.max && self.found.last_key_value().is_some_and(|(last, _)| at > last)
    }

    /// The page.
    pub fn page(mut self) -> UploadPage {
        let is_cut = self.found.len() > self.query.max;
        while self.found.len() > self.query.max {
            self.found.pop_last();
        }
        let mut page = UploadPage::default();
        let last = self.found.last_key_value().filter(|_| is_cut);
        page.next = last.map(|((key, _, id), user)| (key.clone(), user.as_ref().map(|_| id.clone())));
        for ((key, begun, id), user) in self.found {
            match user {
                Some(user) => page.uploads.push(Listed { key, id, begun, user }),
                None => page.groups.push(key),
            }
        }
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::attrs::Given;

    fn upload(key: &str, begun: u64) -> Upload {
        let (key, user) = (key.to_owned(), "u".to_owned());
        Upload { key, given: Given::default(), begun, user, algorithm: None, is_full: false }
    }

    #[test]
    fn pages_have_all_uploads_once_and_in_order() {
        let all: Vec<(String, Upload)> = (0..60_u64)
            .map(|at| {
                let key = ["a", "b/1", "b/2", "c", "hidden/x", "d/e/f"][at as usize % 6];
                (format!("{:02}", at * 37 % 60), upload(key, at * 11 % 7))
            })
            .collect();
        let mut sorted: Vec<_> = all.iter().filter(|(_, one)| !one.key.starts_with("hidden/")).collect();
        sorted.sort_by_key(|(id, one)| (one.key.clone(), one.begun, id.clone()));
        let may_list = |folder: &str| folder != "hidden/";
        for (max, delimiter) in [(1, None), (7, None), (1000, None), (1, Some("/")), (3, Some("/"))] {
            let mut query = UploadQuery { delimiter: delimiter.map(String::from), max, ..UploadQuery::default() };
            let (mut found, mut groups) = (Vec::new(), Vec::new());
            loop {
                let marker = all.iter().find(|(id, _)| Some(id) == query.after_id.as_ref());
                let mut paging = Paging::new(&query, &may_list, marker.map(|(_, upload)| upload));
                for (id, upload) in &all {
                    paging.offer(id, upload);
                    assert!(paging.found.len() <= max + 1);
                }
                let page = paging.page();
                assert!(page.uploads.len() + page.groups.len() <= max);
                found.extend(page.uploads);
                groups.extend(page.groups);
                let Some((key, id)) = page.next else { break };
                (query.after, query.after_id) = (Some(key), id);
            }
            let expected = sorted.iter().filter(|(_, one)| delimiter.is_none() || !one.key.contains('/'));
            let expected: Vec<_> = expected.map(|(id, one)| (&one.key, one.begun, id)).collect();
            assert_eq!(found.iter().map(|one| (&one.key, one.begun, &one.id)).collect::<Vec<_>>(), expected, "{max}");
            assert_eq!(groups, if delimiter.is_some() { vec!["b/", "d/"] } else { vec![] });
        }
        // The upload that a page ended with has ended by now.
        let query =
            UploadQuery { after: Some("b/1".into()), after_id: Some("gone".into()), max: 5, ..Default::default() };
        let mut paging = Paging::new(&query, &may_list, None);
        all.iter().for_each(|(id, upload)| paging.offer(id, upload));
        let page = paging.page();
        assert!(page.uploads.iter().all(|one| one.key == "b/1") && page.uploads.len() == 5);
        let query =
            UploadQuery { prefix: "b/".into(), delimiter: Some("/".into()), max: 100, ..UploadQuery::default() };
        let mut paging = Paging::new(&query, &may_list, None);
        all.iter().for_each(|(id, upload)| paging.offer(id, upload));
        let page = paging.page();
        assert!(page.uploads.len() == 20 && page.groups.is_empty() && page.next.is_none());
    }
}
