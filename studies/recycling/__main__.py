from studies.recycling.study import main

main()
