#include <pop/pop.h>

#include <iostream>

int main(int, char** argv) try {
    const auto model = pop::Model::load(argv[1]);
    pop::GenerateOptions options;
    options.max_new_tokens = 20;
    const auto print = [](const pop::Token& token) { std::cout << token.id << ' ' << std::flush; };
    const auto answer = model.generate({5, 6, 7}, options, print);
    std::cout << "\nfirst token after " << *answer.stats.time_to_first_token_ms << " ms\n";
} catch (const pop::Error& error) {
    std::cerr << error.what() << '\n';
    return error.exit_code();
}
