//! The mount that the store is on.

/// A line of `/proc/self/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mount {
    /// The directory at which it is mounted.
    pub(super) point: String,
    /// The options of the mount and of its file system, separated by commas.
    pub(super) options: String,
    /// The device, or what its file system names instead.
    pub(super) source: String,
}

impl Mount {
    pub(super) fn has(&self, option: &str) -> bool {
        self.options.split(',').any(|found| found == option)
    }
}

/// The mount with this number; `None` if there is no such line. The format is in `proc_pid_mountinfo(5)`.
pub(super) fn mount(id: u64, mountinfo: &str) -> Option<Mount> {
    let id = id.to_string();
    let line = mountinfo.lines().find(|line| line.split(' ').next() == Some(&id))?;
    let (of_mount, of_file_system) = line.split_once(" - ")?;
    let mut of_mount = of_mount.split(' ').skip(4);
    let (point, options) = (of_mount.next()?, of_mount.next()?);
    let mut of_file_system = of_file_system.split(' ').skip(1);
    let (source, more) = (of_file_system.next()?, of_file_system.next().unwrap_or_default());
    Some(Mount { point: unescaped(point), options: format!("{options},{more}"), source: unescaped(source) })
}

/// The kernel writes a space as `\040`, and likewise tab, newline and backslash.
fn unescaped(path: &str) -> String {
    const ESCAPES: [(&str, &str); 4] = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    ESCAPES.iter().fold(path.to_owned(), |path, (escape, character)| path.replace(escape, character))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: &str = "\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
31 22 0:28 / /srv/my\\040models ro,noatime - nfs4 server:/models rw,sync,vers=4.2
32 22 broken line
";

    #[test]
    fn mount_is_found_by_its_number() {
        let root = mount(22, LINES).unwrap();
        assert_eq!((root.point.as_str(), root.source.as_str()), ("/", "/dev/sda1"));
        assert!(root.has("rw") && root.has("errors=remount-ro") && !root.has("ro"));
        let models = mount(31, LINES).unwrap();
        assert_eq!(models.point, "/srv/my models");
        assert!(models.has("ro") && models.has("sync"));
        assert_eq!([2, 32, 99].map(|id| mount(id, LINES)), [None, None, None]);
    }
}
