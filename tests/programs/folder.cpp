/* Lists a folder with C++'s std::filesystem and reads its files. For a model under `blobd exec` it must print the same as
 * for the folder that was imported, except the sizes of safetensors files. */
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace fs = std::filesystem;

int main(int, char **arguments) {
    const fs::path folder = arguments[1];
    if (!fs::is_directory(folder) || fs::exists(folder / "missing.json")) return 1;
    if (fs::canonical(folder / "." / "config.json") != folder / "config.json") return 2;
    std::vector<fs::directory_entry> entries;
    for (const auto &entry : fs::recursive_directory_iterator(folder)) entries.push_back(entry);
    std::sort(entries.begin(), entries.end());
    for (const auto &entry : entries) {
        const std::string name = fs::relative(entry.path(), folder);
        std::printf("%s %d %d %d", name.c_str(), entry.is_regular_file(), entry.is_directory(), entry.is_symlink());
        if (entry.is_regular_file() && entry.path().extension() != ".safetensors") {
            std::ifstream file(entry.path(), std::ios::binary);
            const std::string text{std::istreambuf_iterator<char>(file), {}};
            std::printf(" %zu %zu", (size_t)entry.file_size(), std::hash<std::string>{}(text));
        }
        std::puts("");
    }
}
