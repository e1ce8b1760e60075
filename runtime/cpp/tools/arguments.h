// The command line of pop_run: the flags of pop-run.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "pop/pop.h"

// What was asked for.
struct Arguments {
    std::filesystem::path folder;
    std::optional<std::string> prompt;
    std::optional<std::string> ids;
    bool raw = false;
    std::optional<std::string> system;
    pop::LoadOptions load;
    pop::GenerateOptions generate;
    bool stats = false;
    bool json = false;
};

// Returns the arguments, read as Python's argparse reads those of pop-run; none after --help or --version, which it
// prints. Throws UsageError.
std::optional<Arguments> parse_arguments(int argc, char** argv);
