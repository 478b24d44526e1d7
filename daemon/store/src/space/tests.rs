//! What fits, what is taken, and what is counted.

use super::*;

fn space(quota: u64) -> (tempfile::TempDir, Space) {
    let folder = tempfile::tempdir().unwrap();
    let policy = SpacePolicy { quota_bytes: Some(quota), min_free_bytes: Some(0), ..SpacePolicy::default() };
    let space = Space::new(Root::open(folder.path()).unwrap(), policy).unwrap();
    (folder, space)
}

#[test]
fn eviction_begins_and_ends_at_shares_of_the_quota() {
    let limits = |quota_bytes| {
        let policy = SpacePolicy { quota_bytes, high_percent: 95, low_percent: 80, ..SpacePolicy::default() };
        (policy.high_bytes(), policy.low_bytes())
    };
    assert_eq!(limits(None), (None, None));
    assert_eq!(limits(Some(1000)), (Some(950), Some(800)));
    assert_eq!(limits(Some(u64::MAX)), (Some(17_524_406_870_024_074_034), Some(14_757_395_258_967_641_292)));
}

#[test]
fn nothing_larger_than_the_quota_or_the_disk_could_fit() {
    let (folder, limited) = space(100);
    assert!(limited.could_fit(100).unwrap() && !limited.could_fit(101).unwrap());
    let root = Root::open(folder.path()).unwrap();
    let capacity = root.capacity_bytes().unwrap();
    let full = SpacePolicy { min_free_bytes: Some(u64::MAX), ..SpacePolicy::default() };
    let full = Space::new(root, full).unwrap();
    assert!(full.could_fit(capacity).unwrap() && !full.could_fit(capacity + 1).unwrap());
    full.check_fits(0).unwrap();
    assert!(matches!(full.check_fits(1), Err(StoreError::NoSpace { needed_bytes: 1, .. })));
}

#[test]
fn stored_bytes_are_counted_once() {
    let (_folder, space) = space(100);
    assert!(space.is_uncounted());
    space.count(60);
    assert!(!space.is_uncounted());
    space.count(10);
    assert_eq!((space.used_bytes(), space.shortage(41)), (60, 1));
}

#[test]
fn promised_or_taken_bytes_are_not_given_twice() {
    let (_folder, space) = space(100);
    space.promise(60).unwrap();
    let error = space.promise(41).unwrap_err();
    assert!(matches!(error, StoreError::Quota { needed_bytes: 41, used_bytes: 60, .. }), "{error}");
    space.take(50, 50, || Ok(())).unwrap();
    assert_eq!(space.used_bytes(), 50);
    assert!(space.promise(41).is_err());
    space.release_promise(10);
    space.promise(41).unwrap();
}

#[test]
fn space_is_released_when_an_allocation_fails_or_a_file_is_removed() {
    let (folder, space) = space(100);
    let full = || {
        let root = folder.path().into();
        let (needed_bytes, available_bytes, free_bytes, min_free_bytes) = (1, 0, 0, 0);
        Err(StoreError::NoSpace { root, needed_bytes, available_bytes, free_bytes, min_free_bytes })
    };
    space.promise(100).unwrap();
    space.take(100, 100, full).unwrap_err();
    space.take(100, 100, || Ok(())).unwrap();
    space.stored(100, 30);
    assert_eq!(space.shortage(100), 30);
    space.freed(30);
    assert_eq!(space.shortage(100), 0);
}

#[test]
fn ledger_is_usable_while_the_file_system_allocates() {
    let (_folder, space) = space(100);
    space.promise(60).unwrap();
    let reserve = || {
        assert_eq!(space.used_bytes(), 60);
        assert!(space.promise(41).is_err(), "the bytes are taken");
        space.promise(40)
    };
    space.take(60, 60, reserve).unwrap();
    assert_eq!(space.used_bytes(), 60);
    space.release_promise(40);
    assert_eq!(space.shortage(40), 0);
}

#[test]
fn bytes_counted_twice_during_an_allocation_refuse_no_promise() {
    let (folder, _) = space(0);
    let root = Root::open(folder.path()).unwrap();
    let free = root.free_bytes().unwrap();
    let policy = SpacePolicy { min_free_bytes: Some(free / 2), ..SpacePolicy::default() };
    let space = Space::new(root, policy).unwrap();
    let asked = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reserve = || {
            scope.spawn(|| {
                asked.store(true, std::sync::atomic::Ordering::SeqCst);
                space.promise(free / 4).unwrap();
            });
            while !asked.load(std::sync::atomic::Ordering::SeqCst) {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(20));
            Ok(())
        };
        // `reserve` allocates nothing here, so the space is free again afterwards.
        space.take(free / 3, 0, reserve).unwrap();
    });
}

#[test]
fn status_counts_nothing_and_does_not_wait_for_a_count() {
    let (folder, space) = space(100);
    std::fs::create_dir(folder.path().join(layout::BLOBS)).unwrap();
    std::fs::write(folder.path().join(layout::BLOBS).join("blob"), [7; 5000]).unwrap();
    let status = |space: &Space| space.status().map(|status| (status.used_bytes, status.is_full)).unwrap();
    assert_eq!(status(&space), (None, false), "not counted yet");
    let used = space.used_bytes();
    assert!(used > 100);
    assert_eq!(status(&space), (Some(used), true));
    let counting = space.lock();
    let of_another_thread = std::thread::scope(|scope| scope.spawn(|| status(&space)).join().unwrap());
    assert_eq!(of_another_thread, (Some(used), true), "as it was before the count");
    drop(counting);
    space.freed(used);
    assert_eq!(status(&space), (Some(0), false));
    space.promise(100).unwrap();
    assert_eq!(status(&space), (Some(0), true));
}

#[test]
fn minimum_of_the_file_system_is_left_free() {
    let folder = tempfile::tempdir().unwrap();
    let free = Root::open(folder.path()).unwrap().free_bytes().unwrap();
    let policy = SpacePolicy { min_free_bytes: Some(free), ..SpacePolicy::default() };
    let space = Space::new(Root::open(folder.path()).unwrap(), policy).unwrap();
    assert!(matches!(space.promise(1 << 40), Err(StoreError::NoSpace { .. })));
    assert_eq!(default_min_free(1 << 20), (1 << 20) / 50);
    assert_eq!(default_min_free(1 << 50), 1 << 30);
}

fn write(folder: &tempfile::TempDir, directory: &str, kib: usize) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    let directory = folder.path().join(directory);
    std::fs::create_dir_all(&directory).unwrap();
    let path = directory.join(format!("{kib}"));
    std::fs::write(&path, vec![7; kib << 10]).unwrap();
    path.metadata().unwrap().blocks() * 512
}

#[test]
fn everything_that_the_quota_counts_is_used() {
    let (folder, space) = space(1 << 30);
    let counted = [
        layout::BLOBS,
        layout::RECIPES,
        layout::MANIFESTS,
        layout::ORIGINS,
        layout::HISTORY,
        layout::TRASH,
        layout::QUARANTINE,
        layout::PARTIAL,
        layout::SIGNATURES,
    ];
    let bytes: u64 =
        (1..).zip(counted).map(|(number, directory)| write(&folder, directory, 5 * number)).sum();
    write(&folder, layout::INDEX, 7);
    assert_eq!(space.used_bytes(), bytes);
    let records = bytes - 4096 * (2 + 3) - 4096 * (9 + 10);
    let other = Space::new(Root::open(folder.path()).unwrap(), space.policy()).unwrap();
    other.count(1);
    assert_eq!(other.used_bytes(), 1 + records + 4096 * (9 + 10), "the caller has counted blobs and recipes");
}

#[test]
fn quarantine_is_counted_each_time_and_downloads_after_a_change() {
    let (folder, space) = space(1 << 30);
    assert_eq!(space.used_bytes(), 0);
    let quarantined = write(&folder, layout::QUARANTINE, 5);
    let partial = write(&folder, layout::PARTIAL, 9);
    assert_eq!(space.used_bytes(), quarantined);
    space.recount_partial();
    assert_eq!(space.status().unwrap().used_bytes, Some(quarantined), "as it was at the last count");
    assert_eq!(space.used_bytes(), quarantined + partial);
    assert_eq!(space.status().unwrap().used_bytes, Some(quarantined + partial));
    write(&folder, layout::BLOBS, 13);
    assert_eq!(space.used_bytes(), quarantined + partial, "blobs are kept up to date");
}

#[test]
fn file_moves_from_one_account_to_the_other_without_counting_twice() {
    let (_folder, space) = space(1000);
    let used = |staged: u64, stored: u64, partial: u64| {
        let ledger = space.lock();
        assert_eq!((ledger.staged, ledger.stored, ledger.partial), (staged, Some(stored), Some(partial)));
        drop(ledger);
        assert_eq!(space.used_bytes(), staged + stored + partial);
    };
    space.used_bytes();
    space.take(100, 0, || Ok(())).unwrap();
    used(100, 0, 0);
    space.stays_in_partial(60);
    used(40, 0, 60);
    space.stored_from_partial(50, 45);
    used(40, 45, 10);
    space.stored(30, 20);
    used(10, 65, 10);
    space.unstage(10);
    used(0, 65, 10);
    space.freed(15);
    used(0, 50, 10);
    space.recount_partial();
    space.stays_in_partial(10);
    assert_eq!(space.lock().partial, None, "it is counted when it is needed");
    space.stored_from_partial(10, 10);
    assert_eq!(space.used_bytes(), 60);
}

#[test]
fn limit_that_leaves_less_is_the_one_that_is_named() {
    let (_folder, limited) = space(100);
    let available = |space: &Space| space.available().unwrap();
    limited.promise(30).unwrap();
    assert_eq!(available(&limited), AvailableSpace { bytes: 70, is_limited_by_quota: true });
    let (folder, full) = space(1 << 40);
    full.set_policy(SpacePolicy { min_free_bytes: Some(u64::MAX), ..full.policy() }).unwrap();
    assert_eq!(available(&full), AvailableSpace { bytes: 0, is_limited_by_quota: false });
    full.set_policy(SpacePolicy { quota_bytes: Some(0), ..full.policy() }).unwrap();
    assert_eq!(
        available(&full),
        AvailableSpace { bytes: 0, is_limited_by_quota: false },
        "both leave nothing"
    );
    let unlimited = Space::new(Root::open(folder.path()).unwrap(), SpacePolicy::default()).unwrap();
    let found = available(&unlimited);
    assert!(found.bytes > 1 << 20 && !found.is_limited_by_quota, "{found:?}");
}

#[test]
fn shortage_is_what_the_tighter_limit_lacks() {
    let (_folder, space) = space(100);
    space.count(20);
    space.promise(30).unwrap();
    for (bytes, shortage) in [(0, 0), (50, 0), (51, 1), (100, 50)] {
        assert_eq!(space.shortage(bytes), shortage, "{bytes}");
        assert_eq!(space.check_fits(bytes).is_ok(), shortage == 0, "{bytes}");
    }
    let StoreError::Quota { needed_bytes, used_bytes, quota_bytes, .. } = space.check_fits(51).unwrap_err()
    else {
        panic!()
    };
    assert_eq!((needed_bytes, used_bytes, quota_bytes), (51, 50, 100));
    space.set_policy(SpacePolicy { min_free_bytes: Some(u64::MAX), ..space.policy() }).unwrap();
    assert_eq!((space.shortage(51), space.shortage(7)), (51, 7), "the disk lacks all of it");
    let StoreError::NoSpace { needed_bytes, available_bytes, min_free_bytes, .. } =
        space.check_fits(7).unwrap_err()
    else {
        panic!()
    };
    assert_eq!((needed_bytes, available_bytes, min_free_bytes), (7, 0, u64::MAX));
}

#[test]
fn store_is_full_when_nothing_is_left_of_the_quota_or_of_the_disk() {
    let (_folder, space) = space(100);
    let is_full = || space.status().unwrap().is_full;
    space.count(60);
    assert!(!is_full());
    space.promise(39).unwrap();
    assert!(!is_full());
    space.promise(1).unwrap();
    assert!(is_full());
    space.release_promise(40);
    space.set_policy(SpacePolicy { min_free_bytes: Some(u64::MAX), ..space.policy() }).unwrap();
    assert!(is_full());
    assert_eq!(space.min_free_bytes(), u64::MAX);
    let status = space.status().unwrap();
    assert_eq!(
        (status.quota_bytes, status.used_bytes, status.min_free_bytes),
        (Some(100), Some(60), u64::MAX)
    );
}

#[test]
fn sizes_are_rounded_up_to_blocks_and_counted_only_for_a_quota() {
    let (folder, space) = space(100);
    let block = space.block_bytes;
    for (bytes, on_disk) in [(0, 0), (1, block), (block, block), (block + 1, 2 * block), (u64::MAX, u64::MAX)]
    {
        assert_eq!(space.on_disk(bytes), on_disk, "{bytes}");
    }
    let unlimited = Space::new(Root::open(folder.path()).unwrap(), SpacePolicy::default()).unwrap();
    assert!(space.is_uncounted() && !unlimited.is_uncounted());
    let capacity = unlimited.root.capacity_bytes().unwrap();
    assert_eq!(unlimited.min_free_bytes(), default_min_free(capacity));
}

#[test]
fn refused_take_leaves_what_was_promised() {
    let (_folder, space) = space(100);
    space.promise(60).unwrap();
    let refused = space.take(101, 60, || panic!("nothing is allocated"));
    assert!(matches!(refused, Err(StoreError::Quota { needed_bytes: 101, .. })), "{refused:?}");
    let ledger = space.lock();
    assert_eq!((ledger.promised, ledger.reserving, ledger.staged), (60, 0, 0));
    drop(ledger);
    space.take(100, 60, || Ok(())).unwrap();
    let promised = space.lock().promised;
    assert_eq!((promised, space.used_bytes()), (0, 100));
}

#[test]
fn policies_of_eviction_have_names() {
    let names = [Eviction::Never, Eviction::Pullable, Eviction::All].map(Eviction::name);
    assert_eq!(names, ["never", "pullable", "all"]);
}
