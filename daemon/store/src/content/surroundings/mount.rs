//! The mount that the store is on.

/// A line of `/proc/self/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The directory at which it is mounted.
    pub point: String,
    /// The options of the mount and of its file system, separated by commas.
    pub options: String,
    /// The device, or what its file system names instead.
    pub source: String,
}

impl Mount {
    /// Whether it has this option.
    #[must_use]
    pub fn has(&self, option: &str) -> bool {
        self.options.split(',').any(|found| found == option)
    }

    /// Whether nothing can be changed on it. After an I/O error, ext4 keeps `rw` since Linux 6.14, and adds an option.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        ["ro", "emergency_ro", "shutdown"].iter().any(|option| self.has(option))
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
    #[test]
    fn mount_that_the_kernel_made_read_only_is_recognised() {
        let options = |options: &str| Mount {
            options: options.to_owned(),
            point: "/srv".to_owned(),
            source: "/dev/sdb".to_owned(),
        };
        for read_only in ["ro,noatime", "rw,ro,errors=remount-ro", "rw,relatime,emergency_ro", "rw,shutdown"]
        {
            assert!(options(read_only).is_read_only(), "{read_only}");
        }
        assert!(!options("rw,relatime,errors=remount-ro").is_read_only());
    }
}
