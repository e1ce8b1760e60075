// Size and sha256 of the files that a manifest lists.

#include <openssl/evp.h>

#include <array>
#include <fstream>
#include <memory>
#include <vector>

#include "pop/error.h"
#include "pop/manifest.h"
#include "text_format.h"

namespace pop {

namespace {

// Returns the sha256 of a file's bytes, in hex; empty if the file cannot be read to its end.
std::string sha256_of(const std::filesystem::path& path) {
    const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(), EVP_MD_CTX_free);
    std::ifstream file(path, std::ios::binary);
    if (!context || !file.is_open() || EVP_DigestInit_ex(context.get(), EVP_sha256(), nullptr) != 1) return "";
    std::vector<char> block(std::size_t{1} << 20U);
    while (file) {
        file.read(block.data(), static_cast<std::streamsize>(block.size()));
        if (EVP_DigestUpdate(context.get(), block.data(), static_cast<std::size_t>(file.gcount())) != 1) return "";
    }
    std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
    unsigned int num_bytes = 0;
    if (!file.eof() || file.bad() || EVP_DigestFinal_ex(context.get(), digest.data(), &num_bytes) != 1) return "";
    static constexpr const char* kDigits = "0123456789abcdef";
    std::string hex;
    for (unsigned int index = 0; index < num_bytes; ++index) {
        hex += kDigits[digest[index] >> 4U];
        hex += kDigits[digest[index] & 15U];
    }
    return hex;
}

}  // namespace

void verify_files(const std::filesystem::path& folder, const Manifest& manifest) {
    using internal::message;
    for (const auto& [name, entry] : manifest.files) {
        const auto path = folder / name;
        const auto expected = std::to_string(entry.bytes) + " bytes";
        std::error_code failed;
        if (!std::filesystem::is_regular_file(path, failed)) {
            throw ModelError(message(path.string(), "a file of " + expected, "none", "re-run pop-export"));
        }
        const auto num_bytes = std::filesystem::file_size(path, failed);
        if (failed || static_cast<std::int64_t>(num_bytes) != entry.bytes) {
            throw ModelError(message(path.string(), expected, std::to_string(num_bytes), "re-run pop-export"));
        }
        const auto sha256 = sha256_of(path);
        if (sha256.empty()) {
            throw ModelError(message(path.string(), "a readable file", "none", "check its rights"));
        }
        if (sha256 != entry.sha256) {
            throw ModelError(
                message(path.string(), "sha256 " + entry.sha256, sha256 + " (altered)", "re-run pop-export"));
        }
    }
}

}  // namespace pop
