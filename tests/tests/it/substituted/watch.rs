//! Detects with inotify whether files are opened or changed.

use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;

use blobd_tests::store_dir::snapshot;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;

/// All events but closing: a process that another test has forked may close its copies of descriptors later.
const SEEN: WatchFlags = WatchFlags::OPEN
    .union(WatchFlags::ACCESS)
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::CREATE)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVE);

/// Watches a directory tree.
#[derive(Debug)]
pub(super) struct Watch(OwnedFd);

impl Watch {
    pub(super) fn start(directory: &Path) -> Self {
        let inotify = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).unwrap();
        // Listed before the first watch is added, which would report the listing.
        for path in snapshot(directory).into_keys() {
            inotify::add_watch(&inotify, &path, SEEN | WatchFlags::DONT_FOLLOW).unwrap();
        }
        Self(inotify)
    }

    /// The first events since the start.
    pub(super) fn events(&self) -> Vec<String> {
        const MOST: usize = 4;
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = Reader::new(&self.0, &mut buffer);
        let mut events = Vec::new();
        while events.len() < MOST {
            match reader.next() {
                Ok(event) => {
                    let flags: ReadFlags = event.events();
                    events.push(format!("{flags:?} {:?}", event.file_name().unwrap_or_default()));
                }
                Err(Errno::AGAIN) => break,
                Err(errno) => panic!("inotify: {errno}"),
            }
        }
        events
    }
}
