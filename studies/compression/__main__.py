from studies.compression.study import main

main()
